"""Numbers of slots that are summed over the ranks that reduce each of them, all in one sum."""

from __future__ import annotations

from collections.abc import Sequence

from .slots import Slot

__all__ = ["cell_count", "from_cells", "to_cells"]


def cell_count(slots: Sequence[Slot]) -> int:
    """How many numbers ``to_cells`` returns."""
    return sum(1 if slot.partition is None else slot.partition.groups for slot in slots)


def to_cells(slots: Sequence[Slot], values: Sequence[int]) -> list[int]:
    """One number for each slot, such that a sum over all ranks sums those of each group.

    Every group of a partition has a cell of its own, in which other groups have zero.
    """
    cells: list[int] = []
    for slot, value in zip(slots, values, strict=True):
        if slot.partition is None:
            cells.append(value)
        else:
            row = [0] * slot.partition.groups
            row[slot.partition.place] = value
            cells += row
    return cells


def from_cells(slots: Sequence[Slot], cells: Sequence[int]) -> list[int]:
    """The number of each slot, summed over the ranks that reduce it."""
    values, at = [], 0
    for slot in slots:
        partition = slot.partition
        values.append(cells[at if partition is None else at + partition.place])
        at += 1 if partition is None else partition.groups
    return values
