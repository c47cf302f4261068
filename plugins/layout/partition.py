"""Ranks in groups: some gradients are reduced within each, as those of experts are."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Partition"]


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
