"""In which order a server receives what was pushed, and sends what was asked for.

A link carries what it is given in the order it is given. So little is under way at a time, and what
waits is chosen again whenever something has left or arrived.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from typing import Any

from bytesched.plugins.mpi_kvstore_transfer import Transfer

__all__ = ["Answers"]

#: Values on their way to one worker at a time: the next is there when one has left.
_WINDOW = 2


class Answers:
    """Sends values to one worker, the most urgent of those that are ready first.

    Workers need no window for their pulls: what is asked for and not ready occupies no link.

    Args:
        rank: of that worker.
    """

    def __init__(self, rank: int, transfer: Transfer) -> None:
        self._rank = rank
        self._transfer = transfer
        self._sending = 0
        self._added = 0
        self._ready: list[tuple[int, int, int, Any, Callable[[], None]]] = []

    def add(self, key: int, priority: int, memory: Any, then: Callable[[], None]) -> None:
        """``memory`` is ready to be sent; ``then`` is called when it may be reused."""
        self._added += 1
        heapq.heappush(self._ready, (-priority, self._added, key, memory, then))
        self._send_next()

    def _send_next(self) -> None:
        while self._ready and self._sending < _WINDOW:
            self._sending += 1
            _, _, key, memory, then = heapq.heappop(self._ready)
            self._transfer.give(self._rank, key, memory, partial(self._sent, then))

    def _sent(self, then: Callable[[], None]) -> None:
        self._sending -= 1
        then()
        self._send_next()
