"""Two chunks, one of each rank's, that go together: so a link is busy in both directions."""

from __future__ import annotations

from typing import Any

import torch

from .buckets import Chunk
from .wire import Exchanging

__all__ = ["Pair"]


class Pair:
    """What this rank sums, and what the other one does; one of them may be missing."""

    def __init__(self, own: Chunk | None, other: Chunk | None) -> None:
        self._own = own
        self._other = other
        first = own or other
        assert first is not None
        #: after which it is named: the same on both ranks in number, not in name
        self.first = first
        self._received: torch.Tensor | None = None

    def begin_sum(self, wire: Exchanging) -> Any:
        """Begins to send what the other rank sums, and to take what this one does."""
        self._received = torch.empty_like(self._memory(self._own))
        return wire.exchange(self._received, self._memory(self._other))

    def add(self) -> None:
        """Adds up what has come."""
        if self._own is not None and self._received is not None:
            # In whatever order: of two numbers it is one sum.
            with torch.no_grad():
                self._own.sent.add_(self._received)
        self._received = None

    def begin_return(self, wire: Exchanging) -> Any:
        """Begins to send what this rank has summed, and to take what the other one has."""
        work = wire.exchange(self._memory(self._other), self._memory(self._own))
        for chunk in (self._own, self._other):
            if chunk is not None:
                chunk.work = work
        return work

    def _memory(self, chunk: Chunk | None) -> torch.Tensor:
        # Not over the memory of a bucket, whose uses are counted.
        return torch.empty(0, dtype=self.first.sent.dtype) if chunk is None else chunk.sent

    def __repr__(self) -> str:
        return f"<Pair of {self._own} and {self._other}>"
