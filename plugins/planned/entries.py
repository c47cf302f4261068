"""Parameters whose gradients hooks of ours take, what they have in buckets, and which share one."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch

from .buckets import Bucket, Member
from .bundles import Slot
from .wire import Partition


class Entry:
    """One parameter, whose gradient is awaited in every round, and what it has in a bucket."""

    __slots__ = (
        "bucket",
        "cell",
        "expected",
        "fired",
        "hook_id",
        "index",
        "is_local",
        "partition",
        "slot",
        "view",
    )

    def __init__(self, index: int, slot: Slot, partition: Partition | None, cell: int) -> None:
        self.index = index
        self.slot = slot
        #: the ranks that sum its gradient; None: all
        self.partition = partition
        #: where the ranks say whether it is used: each group of a partition has a cell of its own
        self.cell = cell
        #: how often it gets a gradient in this round, and how often in each
        self.fired, self.expected = 0, 1
        #: it has a gradient from a pass that was not synchronised
        self.is_local = False
        #: of its gradient hook
        self.hook_id = -1
        #: where its gradient is sent from, and the bucket around it
        self.view = slot.parameter.detach().new_empty(0)
        self.bucket: Filling

    @property
    def numel(self) -> int:
        """How many numbers it has in a bucket."""
        return self.slot.parameter.numel()

    def let_go(self) -> None:
        """Its bucket is none any more, and no memory of that is kept here."""
        self.view = self.view.new_empty(0)

    def lay_out(self, member: Member, memory: torch.Tensor) -> None:
        """It is ``member`` of a new bucket, and ``memory`` is its own there, in one dimension."""
        self.view = member.view

    def fill(self, scale: float) -> bool:
        """What is sent is in the bucket; False if the gradient is of another kind than that.

        Args:
            scale: of the gradient.
        """
        grad, view = self.slot.parameter.grad, self.view
        if grad is None:
            view.zero_()
        elif grad.dtype is not view.dtype or grad.device != view.device or grad.is_sparse:
            return False
        elif scale == 1:
            view.copy_(grad)
        else:
            torch.mul(grad, scale, out=view)
        return True

    def __repr__(self) -> str:
        return f"<Entry {self.slot.name!r}, {self.fired} of {self.expected} gradients>"


class Filling:
    """A bucket, and how many gradients it lacks in this round."""

    __slots__ = ("bucket", "entries", "missing", "streams")

    def __init__(self, bucket: Bucket, entries: Sequence[Entry]) -> None:
        self.bucket = bucket
        self.entries = entries
        self.missing = len(entries)
        #: on which its gradients were computed, on a device
        self.streams: Set[Any] = set()


def grouped(entries: Sequence[Entry], order: Sequence[int], bucket_bytes: int) -> list[list[Entry]]:
    """What shares a bucket: neighbours of one dtype and one group of ranks, until it is full.

    Buckets come in the order in which they are complete.

    Args:
        order: in which gradients come, by index.
    """
    found: list[tuple[int, list[Entry]]] = []
    open_: dict[tuple[torch.dtype, Partition | None], list[Entry]] = {}
    room: dict[tuple[torch.dtype, Partition | None], int] = {}
    places: dict[int, int] = {}
    for place, entry in enumerate(entries[index] for index in order):
        kind = entry.slot.parameter.dtype, entry.partition
        mine = open_.setdefault(kind, [])
        mine.append(entry)
        places[id(mine)] = place
        room[kind] = room.get(kind, bucket_bytes) - entry.numel * kind[0].itemsize
        if room[kind] <= 0:
            found.append((place, open_.pop(kind)))
            del room[kind]
    found += [(places[id(mine)], mine) for mine in open_.values()]
    return [mine for _, mine in sorted(found, key=lambda one: one[0])]
