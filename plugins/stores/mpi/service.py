"""In which order a server receives what was pushed, and sends what was asked for.

A link carries what it is given in the order it is given. So little is under way at a time, and what
waits is chosen again whenever something has left or arrived.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .entry import Entry, Spare
from .messages import Message, memory_of
from .transfer import Transfer

__all__ = ["Answers", "Arrivals", "Push"]

#: Values that are being received at a time, from all workers.
_RECEIVING = 4
#: Values on their way to one worker at a time: the next is there when one has left.
_SENDING = 2


@dataclass(eq=False)
class Push:
    """A worker has announced a value, and is offering it."""

    worker: int
    entry: Entry
    message: Message


class Arrivals:
    """Receives values, most complete first: what is nearly summed lets all workers go on (BytePS).

    Args:
        ranks: of the workers, by number.
        arrived: called with each push and its value.
    """

    def __init__(
        self,
        ranks: list[int],
        transfer: Transfer,
        spare: Spare,
        arrived: Callable[[Push, torch.Tensor], None],
    ) -> None:
        self._ranks = ranks
        self._transfer = transfer
        self._spare = spare
        self._arrived = arrived
        self._announced: list[Push] = []
        self._receiving = 0

    def add(self, push: Push) -> None:
        """``push`` was announced."""
        self._announced.append(push)
        self._receive_next()

    def _receive_next(self) -> None:
        while self._announced and self._receiving < _RECEIVING:
            # Of several, the one that was announced first.
            push = min(self._announced, key=lambda p: (-p.entry.taken, -p.message.priority))
            self._announced.remove(push)
            self._receiving += 1
            push.entry.announced -= 1
            push.entry.taken += 1
            buffer = self._spare.take(push.entry.value)
            self._transfer.take(
                self._ranks[push.worker],
                push.message,
                memory_of(buffer),
                partial(self._received, push, buffer),
            )

    def _received(self, push: Push, buffer: torch.Tensor) -> None:
        self._receiving -= 1
        self._arrived(push, buffer)
        self._receive_next()


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
        self._ready: list[tuple[int, int, int, Any]] = []

    def add(self, key: int, priority: int, memory: Any) -> None:
        """``memory`` is ready to be sent."""
        self._added += 1
        heapq.heappush(self._ready, (-priority, self._added, key, memory))
        self._send_next()

    def _send_next(self) -> None:
        while self._ready and self._sending < _SENDING:
            self._sending += 1
            _, _, key, memory = heapq.heappop(self._ready)
            self._transfer.give(self._rank, key, memory, self._sent)

    def _sent(self) -> None:
        self._sending -= 1
        self._send_next()
