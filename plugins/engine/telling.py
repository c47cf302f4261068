"""Numbers of every rank that all ranks see, without waiting for each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dependency.context import Context

__all__ = ["Telling"]


class Telling:
    """Every rank tells as many numbers as the others, and hears those of all.

    In the thread that trains, at the same moments on all ranks. What is told when a round begins,
    and heard when the next one does, is waited for by nobody.

    Args:
        about: what it is about, for errors.
    """

    def __init__(self, context: Context, about: str) -> None:
        self._context = context
        self._about = about
        #: the numbers that are under way, and the work
        self._told: tuple[torch.Tensor, Any] | None = None

    def tell(self, numbers: Sequence[int]) -> None:
        """Those of this rank; what was told before must have been heard."""
        backend = self._context.backend
        # A row for each rank: the sum of all tables has all rows.
        table = torch.zeros(backend.size, len(numbers), dtype=torch.int64, device="cpu")
        table[backend.rank] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        try:
            self._told = table, backend.sum(table, self._about)
        except BaseException as error:
            self._context.progress.fail(error)
            raise

    @property
    def is_under_way(self) -> bool:
        """Whether something was told and is not heard yet."""
        return self._told is not None

    def hear(self) -> list[list[int]]:
        """What the ranks told, by rank; waits for the last of them."""
        assert self._told is not None
        (table, work), self._told = self._told, None
        try:
            self._context.backend.wait(work, task=self._about)
        except BaseException as error:
            # The other ranks learn of it, as they take part in it.
            self._context.progress.fail(error)
            raise
        return [[int(number) for number in row] for row in table.tolist()]

    def close(self) -> None:
        """Lets go of what is under way, which holds the connections."""
        self._told = None

    def __repr__(self) -> str:
        return f"<Telling {self._about!r}, {'under way' if self._told else 'none under way'}>"
