"""Sums of gradients on their way to owners, and back to those who read them; and new parameters.

Gloo's reduce-scatter costs a whole all-reduce; an all-to-all and a sum in the order of ranks half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from ..planned.buckets import Bucket, Member, Sent
from ..planned.bundles import Slot, Update
from ..planned.spans import Carried
from ..planned.wire import Exchanging
from ..update.surroundings import unseen
from .ownership import Ownership, Part, Piece


class _Row:
    """One bucket, as its owners see it."""

    def __init__(self, bucket: Bucket, ownership: Ownership, ranks: int) -> None:
        self.bucket = bucket
        self.name = bucket.chunks[0].name
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        for member in bucket.members:
            for piece in ownership.of(member.parameter):
                _append(ranges[piece.rank], *range_of(member, piece))
        numels = [sum(b - a for a, b in some) for some in ranges]
        rank = ownership.rank
        #: how many numbers go one way and come the other: of what this rank owns, and others do
        self._mine = [0 if other == rank else numels[rank] for other in range(ranks)]
        self._theirs = [0 if other == rank else numel for other, numel in enumerate(numels)]
        self._own = ranges.pop(rank)
        #: in the order of ranks
        self._others = [*chain.from_iterable(ranges)]
        self._received: torch.Tensor | None = None
        self.work: Any = None

    def begin_sum(self, wire: Exchanging) -> Any:
        """Begins to send what others own, and to take theirs of what this rank owns."""
        return self._begin(wire, self._of(self._others), self._mine, self._theirs)

    def add(self) -> None:
        """Makes the sums of what this rank owns, where they belong in the bucket."""
        own = self._of(self._own)
        sizes = [part.numel() for part in own]
        taken = self._taken()
        with unseen():
            for theirs in taken.view(-1, sum(sizes)) if own else ():
                torch._foreach_add_(own, list(theirs.split(sizes)))

    def begin_return(self, wire: Exchanging) -> Any:
        """Begins to send what this rank has summed to all, and to take the other sums."""
        return self._begin(wire, self._of(self._own) * (wire.size - 1), self._theirs, self._mine)

    def put(self) -> None:
        """What came by `begin_return` is in its place."""
        parts = self._of(self._others)
        with unseen():
            if parts:
                came = self._taken().split([part.numel() for part in parts])
                torch._foreach_copy_(parts, list(came))

    def _begin(
        self, wire: Exchanging, parts: list[torch.Tensor], into: Sequence[int], sends: Sequence[int]
    ) -> Any:
        buffer = self.bucket.buffer
        if len(parts) == 1 and not self.bucket.holds_gradients:
            sent = parts[0]
        else:
            with unseen():
                sent = torch.cat([buffer[:0], *parts])
        self._received = buffer.new_empty(sum(into))
        self.work = exchanged(wire, self._received, sent, into, sends)
        return self.work

    def _taken(self) -> torch.Tensor:
        """What came; it is kept here no longer."""
        received, self._received, self.work = self._received, None, None
        assert received is not None
        return received

    def _of(self, ranges: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        # Not kept: uses of a bucket's memory are counted.
        return [self.bucket.buffer[a:b] for a, b in ranges]


class Sums:
    """Those of one round after another."""

    def __init__(
        self, wire: Exchanging, carried: Carried, wait: Callable[[Any, str], None]
    ) -> None:
        self._wire = wire
        self._carried = carried
        self._wait = wait
        #: of this round, those that are under way
        self._under_way: list[_Row] = []

    def start(self, bucket: Bucket, ownership: Ownership) -> None:
        """Its sums begin to go to their owners. In a hook of the reducer: nothing waits here."""
        row = bucket.row
        if row is None:
            row = bucket.row = _Row(bucket, ownership, self._wire.size)
        bucket.is_with_owners = True
        self._carried.begin(partial(row.begin_sum, self._wire), row.name, bucket.buffer.nbytes)
        self._under_way.append(row)
        if not self._wire.has_streams:
            # What came is added up beside backward, and its memory goes.
            while self._under_way and self._under_way[0].work.is_completed():
                self._add(self._under_way.pop(0))

    def finish(self) -> None:
        """Returns when this rank has the sums of all that it owns."""
        while self._under_way:
            self._add(self._under_way.pop(0))

    def _add(self, row: _Row) -> None:
        self._wait(row.work, row.name)
        row.add()

    def bring(self, buckets: Sequence[Bucket]) -> None:
        """Returns when all sums of ``buckets`` are here; collective."""
        self.finish()
        rows = [bucket.row for bucket in buckets]
        works = [
            self._carried.begin(
                partial(row.begin_return, self._wire), row.name, row.bucket.buffer.nbytes
            )
            for row in rows
        ]
        for row, work in zip(rows, works, strict=True):
            self._wait(work, row.name)
            row.put()

    def works(self) -> list[Any]:
        """What is under way."""
        return [row.work for row in self._under_way]

    def let_go(self) -> None:
        """Nothing is under way any more."""
        self._under_way.clear()

    def __repr__(self) -> str:
        return f"<Sums: {len(self._under_way)} buckets under way>"


def range_of(member: Member, piece: Piece) -> tuple[int, int]:
    """Where ``piece`` of a gradient lies in its bucket."""
    begin = int(member.view.storage_offset() - member.bucket.buffer.storage_offset())
    return begin + piece.start, begin + piece.stop


def _append(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    if ranges and ranges[-1][1] == start:
        ranges[-1] = ranges[-1][0], stop
    elif stop > start:
        ranges.append((start, stop))


def exchanged(
    wire: Exchanging,
    into: torch.Tensor,
    sent: torch.Tensor,
    into_numels: Sequence[int],
    sent_numels: Sequence[int],
) -> Any:
    """Begins to send each rank so many numbers of ``sent``, and to take as many; returns the work.

    As bytes: carriers know not all kinds of numbers.
    """
    size = into.element_size()
    return wire.all_to_all(
        into.view(torch.uint8),
        sent.view(torch.uint8),
        [numel * size for numel in into_numels],
        [numel * size for numel in sent_numels],
    )


class Layout:
    """Where pieces of some parameters lie in what one operation brings; the same for each step."""

    def __init__(self, index: int, slots: Sequence[Slot], ownership: Ownership, ranks: int) -> None:
        self.index = index
        self.slots = slots
        first = slots[0].name
        self.name = first if len(slots) == 1 else f"{first}..{slots[-1].name}"
        owned: list[list[tuple[int, Piece]]] = [[] for _ in range(ranks)]
        for slot in slots:
            for piece in ownership.of(slot.parameter):
                owned[piece.rank].append((id(slot), piece))
        #: by rank, how many numbers come from it, and how many go to each other one
        self.numels = [sum(piece.numel for _, piece in some) for some in owned]
        self.own, self.numels[ownership.rank] = self.numels[ownership.rank], 0
        owned[ownership.rank] = []
        #: by the id of its slot, where each piece lies, in the order of ranks
        self.ranges: dict[tuple[int, Piece], tuple[int, int]] = {}
        at = 0
        for key, piece in chain.from_iterable(owned):
            self.ranges[key, piece] = at, at + piece.numel
            at += piece.numel


class Row(Sent):
    """New values of some parameters: from each rank those that it owns."""

    __slots__ = ("__weakref__", "_layout", "slots")

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.slots = layout.slots
        memory = self.slots[0].parameter.new_empty(sum(layout.numels), requires_grad=False)
        super().__init__(layout.index, memory, layout.name)

    def begin(self, wire: Exchanging, mine: Sequence[torch.Tensor]) -> Any:
        """Begins to send ``mine``, what this rank owns of it, and to take what others own."""
        with unseen():
            sent = torch.cat([self.sent[:0], *mine] * (wire.size - 1))
        own = [0 if rank == wire.rank else self._layout.own for rank in range(wire.size)]
        self.work = exchanged(wire, self.sent, sent, self._layout.numels, own)
        return self.work

    def of(self, slot: Slot, piece: Piece) -> torch.Tensor:
        """What came of ``piece``."""
        start, stop = self._layout.ranges[id(slot), piece]
        return self.sent[start:stop]


def arrivals(ownership: Ownership, parts: Mapping[int, Part]) -> Update:
    """What puts what came into parameters.

    Args:
        parts: of parameters that this rank owns a part of, that part; by the id of the parameter.
    """

    def put(row: Row, slot: Slot) -> None:
        parameter = slot.alias
        for piece in ownership.of(slot.parameter):
            if piece.rank == ownership.rank:
                continue
            came = row.of(slot, piece)
            part = parts.get(id(slot.parameter))
            if part is None:
                parameter.copy_(came.view(parameter.shape))
            else:
                part.of(parameter, piece).copy_(came)

    def update(groups: Sequence[tuple[dict[str, Any], Sequence[Slot]]]) -> None:
        with unseen():
            for _, slots in groups:
                for slot in slots:
                    for row in slot.awaits or ():
                        assert isinstance(row, Row)
                        put(row, slot)
                    # Its memory goes with the last of them.
                    slot.awaits = ()

    return update


def layouts_of(
    slots: Sequence[Slot], ownership: Ownership, ranks: int, row_bytes: int
) -> Iterator[Layout]:
    """Neighbours of about ``row_bytes``, all of one type, in the order of ``slots``."""
    run: list[Slot] = []
    nbytes = index = 0
    for slot in slots:
        if run and (nbytes >= row_bytes or run[0].parameter.dtype is not slot.parameter.dtype):
            yield Layout(index, run, ownership, ranks)
            run, nbytes, index = [], 0, index + 1
        run.append(slot)
        nbytes += slot.parameter.nbytes
    if run:
        yield Layout(index, run, ownership, ranks)
