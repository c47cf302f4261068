"""What ranks send each other: sums of gradients to owners and back, and new parameters.

Gloo's reduce-scatter costs a whole all-reduce; an all-to-all and a sum in the order of ranks half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from ..planned.buckets import Bucket, Member, Sent
from ..planned.bundles import Slot
from ..planned.wire import Exchanging
from ..update.surroundings import unseen
from .ownership import Ownership, Piece


class _Shares:
    """Numbers of which each rank owns some, in the order of ranks; ``numels`` says how many."""

    def __init__(self, numels: Sequence[int], rank: int) -> None:
        #: what comes from each other rank, and goes to it, when owners send to all
        self._theirs = [0 if other == rank else numel for other, numel in enumerate(numels)]
        self._mine = [0 if other == rank else numels[rank] for other in range(len(numels))]

    def to_owners(self, wire: Exchanging, sent: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Begins to send what others own, and to take theirs of what this rank does.

        Returns the work, and the memory of what comes.
        """
        return self._begin(wire, sent, self._mine, self._theirs)

    def to_all(self, wire: Exchanging, own: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """Begins to send what this rank owns, and to take what others do; returns the same."""
        sent = torch.cat([*own] * (wire.size - 1))
        return self._begin(wire, sent, self._theirs, self._mine)

    def _begin(
        self, wire: Exchanging, sent: torch.Tensor, into: Sequence[int], sends: Sequence[int]
    ) -> tuple[Any, torch.Tensor]:
        came, size = sent.new_empty(sum(into)), sent.element_size()
        # As bytes: carriers know not all kinds of numbers.
        work = wire.all_to_all(
            came.view(torch.uint8),
            sent.view(torch.uint8),
            [numel * size for numel in into],
            [numel * size for numel in sends],
        )
        return work, came


class BucketRow:
    """One bucket, as its owners see it."""

    def __init__(self, bucket: Bucket, ownership: Ownership, ranks: int) -> None:
        self._bucket = bucket
        self.name = bucket.chunks[0].name
        self.nbytes = bucket.buffer.nbytes
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        for member in bucket.members:
            for piece in ownership.of(member.parameter):
                _append(ranges[piece.rank], *range_of(member, piece))
        self._shares = _Shares([sum(b - a for a, b in some) for some in ranges], ownership.rank)
        self._own = ranges.pop(ownership.rank)
        #: in the order of ranks
        self._others = [*chain.from_iterable(ranges)]
        self._came: torch.Tensor | None = None
        self.work: Any = None

    def begin_sum(self, wire: Exchanging) -> Any:
        """Begins to send what others own, and to take theirs of what this rank owns."""
        parts = self._of(self._others)
        is_apart = len(parts) == 1 and not self._bucket.holds_gradients
        with unseen():
            sent = parts[0] if is_apart else torch.cat([self._bucket.buffer[:0], *parts])
            self.work, self._came = self._shares.to_owners(wire, sent)
        return self.work

    def add(self) -> None:
        """Makes the sums of what this rank owns, where they belong in the bucket."""
        own = self._of(self._own)
        sizes = [part.numel() for part in own]
        came = self._taken()
        with unseen():
            for theirs in came.view(-1, sum(sizes)) if own else ():
                torch._foreach_add_(own, list(theirs.split(sizes)))

    def begin_return(self, wire: Exchanging) -> Any:
        """Begins to send what this rank has summed to all, and to take the other sums."""
        with unseen():
            own = [self._bucket.buffer[:0], *self._of(self._own)]
            self.work, self._came = self._shares.to_all(wire, own)
        return self.work

    def put(self) -> None:
        """What came by `begin_return` is in its place."""
        if parts := self._of(self._others):
            with unseen():
                came = self._taken().split([part.numel() for part in parts])
                torch._foreach_copy_(parts, list(came))

    def _taken(self) -> torch.Tensor:
        """What came; it is kept here no longer."""
        came, self._came, self.work = self._came, None, None
        assert came is not None
        return came

    def _of(self, ranges: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        # Not kept: uses of a bucket's memory are counted.
        return [self._bucket.buffer[a:b] for a, b in ranges]


def range_of(member: Member, piece: Piece) -> tuple[int, int]:
    """Where ``piece`` of a gradient lies in its bucket."""
    begin = int(member.view.storage_offset() - member.bucket.buffer.storage_offset())
    return begin + piece.start, begin + piece.stop


def _append(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    if ranges and ranges[-1][1] == start:
        ranges[-1] = ranges[-1][0], stop
    elif stop > start:
        ranges.append((start, stop))


class Row(Sent):
    """New values of some parameters of one type: from each rank what it owns; as in each step."""

    __slots__ = ("_came", "_left", "_shares", "nbytes", "slots")

    def __init__(self, index: int, slots: Sequence[Slot], ownership: Ownership, ranks: int) -> None:
        first = slots[0]
        name = first.name if len(slots) == 1 else f"{first.name}..{slots[-1].name}"
        super().__init__(index, first.parameter.new_empty(0, requires_grad=False), name)
        self.slots = slots
        owned: list[list[tuple[Slot, Piece]]] = [[] for _ in range(ranks)]
        for slot in slots:
            for piece in ownership.of(slot.parameter):
                owned[piece.rank].append((slot, piece))
        numels = [sum(piece.numel for _, piece in some) for some in owned]
        self._shares = _Shares(numels, ownership.rank)
        del owned[ownership.rank]
        #: by slot, each piece that comes, and where it begins
        self._came: dict[Slot, list[tuple[Piece, int]]] = {}
        at = 0
        for slot, piece in chain.from_iterable(owned):
            self._came.setdefault(slot, []).append((piece, at))
            at += piece.numel
        #: that come
        self.nbytes = at * first.parameter.element_size()
        #: slots that have not taken what came
        self._left = 0

    def begin(self, wire: Exchanging, mine: Sequence[torch.Tensor]) -> Any:
        """Begins to send ``mine``, what this rank owns of it, and to take what others own."""
        with unseen():
            self.work, self.sent = self._shares.to_all(wire, [self.sent[:0], *mine])
        self.landed_on, self._left = None, len(self._came)
        return self.work

    def take(self, slot: Slot) -> list[tuple[Piece, torch.Tensor]]:
        """What came of ``slot``; once."""
        came = [(piece, self.sent[at : at + piece.numel]) for piece, at in self._came[slot]]
        self._left -= 1
        if not self._left:
            self.let_go()
        return came

    def let_go(self) -> None:
        """Its memory is not kept here any more, nor what keeps it."""
        self.sent, self.work = self.sent.new_empty(0), None


def rows_of(
    slots: Sequence[Slot], ownership: Ownership, ranks: int, row_bytes: int
) -> Iterator[Row]:
    """Neighbours of about ``row_bytes``, all of one type, in the order of ``slots``."""
    run: list[Slot] = []
    nbytes = index = 0
    for slot in slots:
        if run and (nbytes >= row_bytes or run[0].parameter.dtype is not slot.parameter.dtype):
            yield Row(index, run, ownership, ranks)
            run, nbytes, index = [], 0, index + 1
        run.append(slot)
        nbytes += slot.parameter.nbytes
    if run:
        yield Row(index, run, ownership, ranks)
