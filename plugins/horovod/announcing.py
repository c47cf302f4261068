"""What a rank of Horovod is about to do, announced to the others."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any, Final

from bytesched.config import Config
from bytesched.errors import TransportError, in_one_line

from ..warmup.agree import disagreement
from .optimizer import decline
from .wire import Wire

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
        self._wire = Wire(
            optimizer.process_set,
            average=False,
            predivide=1.0,
            name=f"bytesched.announcement{next(_number)}",
            timeout_s=Config.timeout_s,
        )
        self._works = self._wire.announce_text("intent", json.dumps(statements))

    @property
    def is_first(self) -> bool:
        """Whether no lower rank has made one."""
        return self._wire.rank == 0

    def objection(self) -> str:
        """Why the ranks do not go on together, the same on all of them; empty if they do."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while not all(map(self._wire.is_done, self._works)):
            if time.monotonic() > deadline_s:
                return (
                    "a rank takes no part: it does not run under bytesched, or is not at the same "
                    "place of the script"
                )
            time.sleep(_NAP_S)
        try:
            texts = self._wire.texts(self._works)
        except TransportError as error:
            return in_one_line(error)
        return disagreement({r: json.loads(t) for r, t in enumerate(texts)}, self._wire.rank)

    def withdraw(self, why: str) -> None:
        """This rank does not go on as it has announced."""
        decline(self._optimizer, why)
