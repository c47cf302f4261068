"""What all ranks' scripts come to in one order, and that they come to the same.

Collectives of two ranks that differ may never end, or end the process. So before rows of a step are
sent, the ranks compare which ones these are, over a group of Gloo; nobody waits for that but rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from bytesched.errors import BytesschedError, MismatchError
from bytesched.scheduler import EventThread

from ..groups.group import PATIENCE_S, Group

__all__ = ["Sent", "Turns"]

_TASK = "which parameters are sent next"


class Sent(IntEnum):
    """What owners send of their chunks in a turn."""

    #: that a step has updated
    PARAMETERS = 0
    #: that no step has taken
    GRADIENTS = 1


class Turns:
    """Calls one thing after the other, each when all ranks have agreed on those before it.

    They agree if they send the same of the same chunks, after as many rounds and turns.

    Args:
        group: of Gloo; only these turns use it.
        failed: called with an error, after which nothing is called.
    """

    def __init__(self, group: Group, failed: Callable[[BaseException], None]) -> None:
        self._group = group
        self._failed = failed
        self._thread = EventThread()
        #: comparisons, each counted by one thread
        self._begun = self._ended = 0
        #: that have begun
        self._rounds = 0
        self._broken = self._closed = False

    def begin_round(self, go: Callable[[], None]) -> None:
        """A backward pass begins: ``go`` is called when its turn comes. The user's thread."""
        self._rounds += 1
        self._thread.put(self._go, go)

    def agree(self, sent: Sent, indices: Iterable[int], go: Callable[[], None]) -> None:
        """``go`` is called in its turn, if all ranks send this of these chunks, in this round.

        The user's thread.

        Args:
            indices: of the chunks, in any order.
        """
        digest = crc32(array("q", [self._begun, *sorted(indices)]).tobytes())
        here = [digest, sent, self._rounds]
        # One message: the highest of each, and the lowest, negated.
        numbers = torch.tensor([*here, *(-n for n in here)], dtype=torch.int64, device="cpu")
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._begun += 1
        try:
            work = self._group.backend.allreduce([numbers], options)
        except RuntimeError as error:
            self._fail(self._group.error(error, task=_TASK))
            return
        self._thread.put(partial(self._compare, numbers, work), go)

    @property
    def is_idle(self) -> bool:
        """Whether all that was begun has been compared."""
        return self._ended == self._begun

    def close(self) -> None:
        """Ends the thread; what it waits for fails. Idempotent."""
        self._closed = True
        self._thread.close()
        if not self.is_idle:
            self._group.abort()
        self._thread.join(PATIENCE_S)

    def _compare(self, numbers: torch.Tensor, work: Any, go: Callable[[], None]) -> None:
        try:
            self._group.wait(work, task=_TASK)
        except BytesschedError as error:
            self._fail(error)
            return
        self._ended += 1
        spans = (numbers[:3] + numbers[3:]).tolist()
        if any(spans):
            self._fail(
                MismatchError(
                    f"rank {self._group.rank} and another rank send different parameters or "
                    f"gradients next: {_difference(*spans)}. With shard=True each rank waits for "
                    "what the others update: do the same on all ranks, or train without shard=True"
                )
            )
        self._go(go)

    def _go(self, go: Callable[[], None]) -> None:
        if not self._broken:
            go()

    def _fail(self, error: BaseException) -> None:
        is_first, self._broken = not self._broken, True
        if is_first and not self._closed:
            self._failed(error)

    def __repr__(self) -> str:
        return f"<Turns {self._ended} of {self._begun} compared>"


def _difference(_: int, kinds: int, rounds: int) -> str:
    """In words, from how far apart ranks are in each number."""
    found = []
    if kinds:
        found.append(
            "some ranks send parameters that a step() has updated, others gradients that no step() "
            "has taken: on one of them a step was left out"
        )
    if rounds:
        passes = "backward pass" if rounds == 1 else "backward passes"
        found.append(f"ranks are {rounds} {passes} apart")
    return " and ".join(found) or (
        "on one of them a step was left out, a gradient was set to None, or optimizers step in "
        "another order"
    )
