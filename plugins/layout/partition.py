"""Ranks in groups: gradients that some ranks reduce among themselves, as those of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .slots import Slot

__all__ = ["Partition", "cell_count", "from_cells", "to_cells"]


@dataclass(frozen=True)
class Partition:
    """A division of all ranks into groups, each of which reduces its gradients alone."""

    #: of the partition, the same on all ranks, from 1 on
    number: int
    #: the ranks of the group that this rank is in
    members: tuple[int, ...]
    #: of that group among all of the partition
    place: int
    #: how many there are
    groups: int


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
