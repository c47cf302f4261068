"""What a rank of Horovod is about to do, announced to the others."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any, Final

from bytesched.config import Config
from bytesched.errors import TransportError, in_one_line

from ..warmup.agree import disagreement
from .operations import Operations
from .optimizer import decline

__all__ = ["Announcement"]

#: for an answer that all ranks have made possible already
_PATIENCE_S: Final = 10.0
_NAP_S: Final = 1e-3

#: of this process
_number = itertools.count()


class Announcement:
    """The n-th of each rank of an optimizer's process set; made without waiting for any other.

    A reduction of all ranks has to lie between its making and `objection`: then whoever makes
    one at all has made it, however slow.

    Args:
        optimizer: what ``hvd.DistributedOptimizer`` has made.
        statements: what has to be the same on all ranks for all to go on.
    """

    def __init__(self, optimizer: Any, statements: list[str]) -> None:
        self._optimizer = optimizer
        self._operations = Operations(
            optimizer.process_set,
            name=f"bytesched.announcement{next(_number)}",
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
        while not all(map(self._operations.is_done, self._works)):
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
        return disagreement({r: json.loads(t) for r, t in enumerate(texts)}, self._operations.rank)

    def withdraw(self, why: str) -> None:
        """This rank does not go on as it has announced."""
        decline(self._optimizer, why)
