"""Parameters on their way from owners to all ranks, some neighbours at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..planned.buckets import Sent
from ..planned.bundles import Slot
from ..planned.wire import Wire
from ..update.surroundings import unseen
from .ownership import Ownership, Part, Piece
from .sums import bytes_of

__all__ = ["Arrivals", "Row", "rows_of"]


class Row(Sent):
    """New values of some parameters: from each rank those that it owns."""

    __slots__ = ("__weakref__", "_numels", "_own", "_ranges", "slots")

    def __init__(self, index: int, slots: Sequence[Slot], ownership: Ownership, ranks: int) -> None:
        self.slots = slots
        #: by rank, how many numbers come from it, and how many go to each other one
        self._numels = [0] * ranks
        self._own = 0
        #: where each piece lies in what is received, in the order of ranks
        self._ranges: dict[tuple[int, Piece], tuple[int, int]] = {}
        at = 0
        for rank in range(ranks):
            for slot in slots:
                for piece in ownership.of(slot.parameter):
                    if piece.rank != rank:
                        continue
                    if rank == ownership.rank:
                        self._own += piece.numel
                        continue
                    self._ranges[id(slot), piece] = at, at + piece.numel
                    at += piece.numel
                    self._numels[rank] += piece.numel
        first = slots[0]
        name = first.name if len(slots) == 1 else f"{first.name}..{slots[-1].name}"
        super().__init__(index, first.parameter.new_empty(at, requires_grad=False), name)

    def begin(self, wire: Wire, mine: Sequence[torch.Tensor]) -> Any:
        """Begins to send ``mine``, what this rank owns of it, and to take what others own."""
        size = self.sent.element_size()
        with unseen():
            sent = torch.cat([self.sent[:0], *mine] * (wire.size - 1))
        own = [0 if rank == wire.rank else self._own for rank in range(wire.size)]
        self.work = wire.all_to_all(
            bytes_of(self.sent),
            bytes_of(sent),
            [numel * size for numel in self._numels],
            [numel * size for numel in own],
        )
        return self.work

    def of(self, slot: Slot, piece: Piece) -> torch.Tensor:
        """What came of ``piece``."""
        start, stop = self._ranges[id(slot), piece]
        return self.sent[start:stop]


class Arrivals:
    """Puts what came into parameters.

    Args:
        parts: of parameters that this rank owns a part of, that part; by the id of the parameter.
    """

    def __init__(self, ownership: Ownership, parts: Mapping[int, Part]) -> None:
        self._ownership = ownership
        self._parts = parts

    def update(self, groups: Sequence[tuple[dict[str, Any], Sequence[Slot]]]) -> None:
        """See `Later.update`."""
        with unseen():
            for _, slots in groups:
                for slot in slots:
                    for row in slot.awaits or ():
                        assert isinstance(row, Row)
                        self._put(row, slot)
                    # Its memory goes with the last of them.
                    slot.awaits = ()

    def _put(self, row: Row, slot: Slot) -> None:
        parameter = slot.alias
        for piece in self._ownership.of(slot.parameter):
            if piece.rank == self._ownership.rank:
                continue
            came = row.of(slot, piece)
            part = self._parts.get(id(slot.parameter))
            if part is None:
                parameter.copy_(came.view(parameter.shape))
            else:
                part.of(parameter, piece).copy_(came)


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
