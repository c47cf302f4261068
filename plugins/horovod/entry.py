"""Before ranks of Horovod do anything together: whether each of them is about to do the same.

What a rank announces may stay without an answer, and a rank that goes on alone does not wait for
one. So all ranks know of it, and none waits in a collective for one that never comes.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any, Final

import horovod.torch as hvd
import torch

from bytesched.config import Config
from bytesched.environment import is_horovod_elastic
from bytesched.errors import MismatchError, TransportError, in_one_line

from ..agree import agree, disagreement
from .operations import Operations, Work

#: for an answer that all ranks have made possible already
_PATIENCE_S: Final = 10.0
_NAP_S: Final = 1e-3

#: of this process; a rank that joined late has made fewer
_number = itertools.count()
_announcements = itertools.count()


class Entry:
    """One ``wrap`` that the ranks of ``process_set`` enter together, the n-th of each of them.

    A context: an error in it is declared to the other ranks, in place of what comes next.
    """

    def __init__(self, process_set: hvd.ProcessSet, timeout_s: float) -> None:
        self._number = next(_number)
        name = "bytesched.entry" if is_horovod_elastic() else f"bytesched.entry{self._number}"
        self._operations = Operations(process_set, name=name, timeout_s=timeout_s)
        self._stages = 0
        #: of the session, the same on all ranks, unique in this job; after the first ``agree``
        self.name = ""

    def agree(self, statements: list[str]) -> None:
        """Waits until all ranks have come as far, with the same ``statements``.

        Raises `MismatchError` if one of them has others, or has declined.
        """
        operations = self._operations
        answers = [*map(json.loads, operations.texts(self._declare("")))]
        for rank, (_, why) in enumerate(answers):
            if why:
                raise MismatchError(
                    f"rank {rank} does not wrap: {why} (seen by rank {operations.rank})"
                )
        agree(statements, operations.rank, operations.gather_text)
        number = max(number for number, _ in answers)
        while self._number < number:
            self._number = next(_number)
        self.name = f"bytesched.{number}"

    def decline(self, why: str) -> None:
        """This rank goes on alone; the others raise, with its reason ``why``."""
        self._declare(why)

    def _declare(self, why: str) -> tuple[Work, Work]:
        stage, self._stages = self._stages, self._stages + 1
        return self._operations.announce_text(str(stage), json.dumps([self._number, why]))

    def __enter__(self) -> Entry:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, (MismatchError, TransportError)):
            self.decline(in_one_line(error))


def decline(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Where others wrap ``optimizer``, this rank does not, and they raise its reason ``why``."""
    process_set = vars(optimizer).get("process_set")
    # An elastic rank may be alone in what it does now, until the next reset.
    if not hvd.is_initialized() or process_set is None or is_horovod_elastic():
        return
    if process_set.included() and process_set.size() > 1:
        Entry(process_set, Config.timeout_s).decline(why)


class Announcement:
    """What a rank is about to do, the n-th time; made without waiting for any other.

    A reduction of all ranks has to lie between its making and `objection`: then whoever makes
    one at all has made it, however slow.

    Args:
        optimizer: what ``hvd.DistributedOptimizer`` has made.
        statements: what has to be the same on all ranks of its process set for all to go on.
    """

    def __init__(self, optimizer: Any, statements: list[str]) -> None:
        self._optimizer = optimizer
        self._operations = Operations(
            optimizer.process_set,
            name=f"bytesched.announcement{next(_announcements)}",
            timeout_s=Config.timeout_s,
        )
        self._works = self._operations.announce_text("intent", json.dumps(statements))

    @property
    def is_first(self) -> bool:
        """Whether no lower rank has made one."""
        return self._operations.rank == 0

    def objection(self) -> str:
        """Why the ranks do not go on together, the same on all of them; empty if they do."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while not all(work.is_completed() for work in self._works):
            if time.monotonic() > deadline_s:
                return (
                    "a rank takes no part: it does not run under bytesched, or is not at the same "
                    "place of the script"
                )
            time.sleep(_NAP_S)
        try:
            texts = self._operations.texts(self._works)
        except TransportError as error:
            return in_one_line(error)
        return disagreement(dict(enumerate(map(json.loads, texts))), self._operations.rank)

    def withdraw(self, why: str) -> None:
        """This rank does not go on as it has announced."""
        decline(self._optimizer, why)
