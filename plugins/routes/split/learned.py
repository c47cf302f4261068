"""The order in which rank 0 has submitted chunks, on its way to all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import torch

from bytesched.errors import SchedulerTimeout

from ..groups.group import Group
from ..groups.messages import Messages
from .gathers import Gather

__all__ = ["LearnedOrder"]

#: of no chunk's message
_TAG: Final = (1 << 20) + 1
_TASK: Final = "the order of gradients"


class LearnedOrder:
    """Rank 0 sends an order as it begins a round; all ranks use it from the next round on.

    No rank waits for one that is late: without rank 0, which sends first, no round comes to an end.

    Args:
        expect: has a thread wait for a receive.
    """

    def __init__(
        self, group: Group, messages: Messages, expect: Callable[[Iterable[Gather]], None]
    ) -> None:
        self._group = group
        self._messages = messages
        self._expect = expect
        self._arrived = threading.Event()
        #: until the end of the round, unless it cannot come
        self._order: torch.Tensor | None = None
        #: rank 0's, with the memory that they read
        self._sends: list[tuple[torch.Tensor, Any]] = []

    def begin(self, indices: list[int]) -> None:
        """Rank 0 sends ``indices``; on the other ranks only their number matters."""
        self._order = order = torch.tensor(indices, dtype=torch.int64, device="cpu")
        self._arrived.clear()
        try:
            if self._group.rank == 0:
                self._sends = [
                    (order, self._group.send(order, peer, _TAG))
                    for peer in range(1, self._group.size)
                ]
                self._arrived.set()
            else:
                work = self._group.receive(order, 0, _TAG)
                self._expect([partial(self._receive, work)])
        except RuntimeError as error:
            raise self._group.error(error, task=_TASK) from error

    def end(self) -> list[int] | None:
        """The order that was on its way in the round that is over, if one was."""
        if self._order is not None and not self._arrived.wait(self._group.timeout_s):
            raise SchedulerTimeout(
                f"nothing came from rank 0 within {self._group.timeout_s:g} s: see its own log; "
                "raise timeout_s if it was only slow",
                task=_TASK,
                rank=self._group.rank,
            )
        order, self._order = self._order, None
        return None if order is None else list(map(int, order.tolist()))

    def _receive(self, work: Any) -> None:
        try:
            self._messages.wait(work, 0, task=_TASK)
        except BaseException:
            # It is reported, and raised where training waits next.
            self._order = None
            raise
        finally:
            self._arrived.set()

    def close(self) -> None:
        """Lets go of what was sent, which holds the connections."""
        self._sends = []

    def __repr__(self) -> str:
        state = "nothing" if self._order is None else "an order"
        return f"<LearnedOrder {state} on its way>"
