"""Memory that is taken and given back in one order."""

from __future__ import annotations

from collections import deque
from typing import Final

import torch

__all__ = ["ALIGNED_BYTES", "Ring"]

#: at a multiple of which each part begins
ALIGNED_BYTES: Final = 64


class Ring:
    """One block of memory, of which parts of any length are taken: the first is given back first.

    Small parts take no more than they need, so that many of them fit.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        #: where each begins and ends that is taken, in that order
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, like: torch.Tensor, count: int) -> list[torch.Tensor] | None:
        """So many flat tensors as long as ``like``; None if there is no room for them now."""
        nbytes = count * (-(-like.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES)
        start_at = self._taken[-1][1] if self._taken else 0
        stop_at = self._memory.nbytes
        if self._taken:
            first_at = self._taken[0][0]
            if start_at <= first_at:
                stop_at = first_at
            elif start_at + nbytes > stop_at:
                start_at, stop_at = 0, first_at
        if start_at + nbytes > stop_at:
            return None
        self._taken.append((start_at, start_at + nbytes))
        parts = self._memory[start_at : start_at + nbytes].chunk(count)
        return [part[: like.nbytes].view(like.dtype) for part in parts]

    def give_back(self) -> None:
        """The first of what is taken is free."""
        self._taken.popleft()

    def close(self) -> None:
        """Nothing is taken any more; what refers to this keeps no memory alive."""
        self._taken.clear()
        self._memory = self._memory.new_empty(0)

    def __repr__(self) -> str:
        return f"<Ring of {self._memory.nbytes} bytes, {len(self._taken)} parts taken>"
