"""Parameters on their way from owners to all ranks, some neighbours at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ..planned.buckets import Sent
from ..planned.bundles import Slot, Update
from ..planned.wire import Exchanging
from ..update.surroundings import unseen
from .ownership import Ownership, Part, Piece
from .sums import exchanged


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
