"""Ranks in groups: some gradients are summed within each, as those of experts are."""

from __future__ import annotations

from dataclasses import dataclass

from .wire import Summing

__all__ = ["Partition"]


@dataclass(frozen=True, eq=False)
class Partition:
    """A division of all ranks into groups, each of which sums its gradients alone.

    All ranks have the same ones in the same order, but groups of their own.
    """

    #: the ranks of the group that this rank is in
    members: tuple[int, ...]
    #: of that group among all of the partition
    place: int
    #: how many there are
    groups: int
    #: what sums over that group
    wire: Summing
