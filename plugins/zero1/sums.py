"""What ranks send each other: sums of gradients to owners and back, and new parameters.

Gloo's reduce-scatter costs a whole all-reduce; an all-to-all and a sum in the order of ranks half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from ..planned.buckets import Bucket, Member, Sent
from ..planned.bundles import Slot
from ..planned.wire import Exchanging
from ..update.surroundings import unseen
from .ownership import Ownership, Piece


class Place(NamedTuple):
    """Elements that one rank owns."""

    numel: int
    #: where they are; not kept, as uses of a bucket's memory are counted
    memory: Callable[[], torch.Tensor]


class Row(Sent):
    """What one all-to-all carries: sums to their owners, or from owners to all.

    Args:
        empty: of its dtype, on its device.
        owned: by rank.
        slots: the parameters that get new values by it.
    """

    __slots__ = ("_mine", "_others", "_own", "_theirs", "nbytes", "slots")

    def __init__(
        self,
        index: int,
        name: str,
        empty: torch.Tensor,
        owned: Sequence[Sequence[Place]],
        rank: int,
        slots: Sequence[Slot] = (),
    ) -> None:
        super().__init__(index, empty, name)
        self.slots = slots
        numels = [sum(place.numel for place in places) for places in owned]
        self.nbytes = sum(numels) * empty.element_size()
        #: what comes from each other rank, and goes to it, when owners send to all
        self._theirs = [0 if other == rank else numel for other, numel in enumerate(numels)]
        self._mine = [0 if other == rank else numels[rank] for other in range(len(numels))]
        self._own = owned[rank]
        #: in the order of ranks
        self._others = [*chain(*owned[:rank], *owned[rank + 1 :])]

    def begin_sum(self, wire: Exchanging, *, is_kept: bool) -> Any:
        """Begins to send what others own, and to take theirs of what this rank owns.

        Args:
            is_kept: nothing writes what is sent before `add`.
        """
        with unseen():
            parts = [place.memory() for place in self._others]
            sent = parts[0] if is_kept and len(parts) == 1 else self._joined(parts)
            return self._begin(wire, sent, self._mine, self._theirs)

    def add(self) -> None:
        """Makes the sums of what this rank owns, where they belong."""
        came = self._taken()
        with unseen():
            own = [place.memory() for place in self._own]
            for theirs in came.view(-1, sum(map(torch.Tensor.numel, own))) if own else ():
                torch._foreach_add_(own, _like(own, theirs))

    def begin_spread(self, wire: Exchanging) -> Any:
        """Begins to send what this rank owns to all, and to take what others own."""
        with unseen():
            sent = self._joined([place.memory() for place in self._own] * (wire.size - 1))
            return self._begin(wire, sent, self._theirs, self._mine)

    def put(self) -> None:
        """What came by `begin_spread` is in its place."""
        with unseen():
            if parts := [place.memory() for place in self._others]:
                torch._foreach_copy_(parts, _like(parts, self._taken()))

    def let_go(self) -> None:
        """Its memory is not kept here any more, nor what keeps it."""
        self.sent, self.work = self.sent.new_empty(0), None

    def _taken(self) -> torch.Tensor:
        came = self.sent
        self.let_go()
        return came

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([self.sent.new_empty(0), *(part.reshape(-1) for part in parts)])

    def _begin(
        self, wire: Exchanging, sent: torch.Tensor, into: Sequence[int], sends: Sequence[int]
    ) -> Any:
        came, size = sent.new_empty(sum(into)), sent.element_size()
        # As bytes: carriers know not all kinds of numbers.
        self.work = wire.all_to_all(
            came.view(torch.uint8),
            sent.view(torch.uint8),
            [numel * size for numel in into],
            [numel * size for numel in sends],
        )
        self.sent, self.landed_on = came, None
        return self.work


def _like(parts: Sequence[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """The elements of ``flat`` in the shapes of ``parts``."""
    split = flat.split([part.numel() for part in parts])
    return [elements.view(part.shape) for elements, part in zip(split, parts, strict=True)]


def range_of(member: Member, piece: Piece) -> tuple[int, int]:
    """Where ``piece`` of a gradient lies in its bucket."""
    begin = int(member.view.storage_offset() - member.bucket.buffer.storage_offset())
    return begin + piece.start, begin + piece.stop


def row_of(bucket: Bucket, ownership: Ownership, ranks: int) -> Row:
    """One bucket, as its owners see it: neighbours of one owner are one place."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for member in bucket.members:
        for piece in ownership.of(member.parameter):
            start, stop = range_of(member, piece)
            here = ranges[piece.rank]
            if here and here[-1][1] == start:
                start, _ = here.pop()
            if stop > start:
                here.append((start, stop))
    owned = [[Place(b - a, partial(_range, bucket, a, b)) for a, b in some] for some in ranges]
    first = bucket.chunks[0]
    return Row(first.index, first.name, bucket.buffer.new_empty(0), owned, ownership.rank)


def _range(bucket: Bucket, start: int, stop: int) -> torch.Tensor:
    return bucket.buffer[start:stop]
