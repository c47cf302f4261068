"""A halo, cut into pieces, each for one rank and from another; a short one is not cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .matrices import by_rows, entries, going_on

__all__ = ["Halo", "Piece", "cut"]


@dataclass(frozen=True, eq=False)
class Halo:
    """What a rank needs of others, by distance of their owner, and what it gives."""

    rank: int
    #: how many rows each rank needs from each
    counts: Sequence[Sequence[int]]
    #: by rank, the places of own rows that it needs
    give: Sequence[Tensor]
    #: edges from the halo to own vertices, in coordinates
    matrix: Tensor

    @property
    def most_rows(self) -> int:
        """How many rows a rank sends or receives, at most; the same on all ranks."""
        received = [sum(row) for row in self.counts]
        sent = [sum(column) for column in zip(*self.counts, strict=True)]
        most: int = max(*received, *sent)
        return most


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows for one rank, and some from another one; or a short halo, for all and from all."""

    #: the places of own rows that are sent, by the rank that gets them
    give: Tensor
    #: how many rows each rank gets, and sends
    send: list[int]
    receive: list[int]
    #: ranks by distance, in whose order sums run: who gets rows, and who sends some
    targets: list[int]
    sources: list[int]
    #: from a sum so far, and the rows received below it, to the sum with these
    going_on: Tensor
    #: edges of the rows received, from own vertices to those rows, by rows
    transposed: Tensor
    #: it is the whole halo, and short
    is_short: bool

    def by_distance(self, rows: Tensor) -> Tensor:
        """Rows as they are received, by rank, in the order of the halo."""
        if len(self.sources) == 1:
            return rows
        by_rank = rows.split(self.receive)
        return torch.cat([by_rank[source] for source in self.sources])

    def by_rank(self, rows: Tensor) -> Tensor:
        """The reverse."""
        if len(self.sources) == 1:
            return rows
        parts = rows.split([self.receive[source] for source in self.sources])
        of = dict(zip(self.sources, parts, strict=True))
        return torch.cat([of[source] for source in sorted(of)])

    def add_to(self, total: Tensor, rows: Tensor) -> None:
        """Adds gradients of the rows that were given, as they come back."""
        places, by_rank = self.give.split(self.send), rows.split(self.send)
        for target in self.targets:
            # No rank was given a row twice, so there is no order to keep.
            total.index_add_(0, places[target], by_rank[target])


def cut(halo: Halo, most_rows: int, *, is_short: bool) -> list[Piece]:
    """The pieces, in each of which no rank sends more than ``most_rows``; as many on all ranks.

    The first ones go to the next rank and come from the one before, then to the second next and so
    on. The halo keeps its order, so that sums do not depend on where it is cut. A short one
    is not cut.
    """
    size, mine = len(halo.counts), halo.rank
    # By column, so that the edges of a piece lie side by side.
    rows, columns = halo.matrix.indices()
    columns, order = columns.sort(stable=True)
    rows, values = rows[order], halo.matrix.values()[order]

    def edges(begin: int, count: int) -> Tensor:
        """Of so many rows of the halo, in coordinates."""
        ends = columns.new_tensor([begin, begin + count])
        first, last = torch.searchsorted(columns, ends).tolist()
        places = columns[first:last] - begin
        shape = (halo.matrix.shape[0], count)
        return entries(rows[first:last], places, values[first:last], shape)

    distances = range(1, size)
    if is_short:
        matrix = edges(0, halo.matrix.shape[1])
        short = Piece(
            give=torch.cat(list(halo.give)),
            send=[len(places) for places in halo.give],
            receive=list(halo.counts[mine]),
            targets=[(mine + distance) % size for distance in distances],
            sources=[(mine - distance) % size for distance in distances],
            going_on=going_on(matrix),
            transposed=by_rows(matrix.t().coalesce()),
            is_short=True,
        )
        return [short]
    pieces: list[Piece] = []
    begin = 0
    for distance in distances:
        to, by = (mine + distance) % size, (mine - distance) % size
        longest = max(halo.counts[(rank + distance) % size][rank] for rank in range(size))
        slices = -(-longest // most_rows)
        for number in range(slices):
            sent = _slice(len(halo.give[to]), number, slices)
            received = _slice(halo.counts[mine][by], number, slices)
            count = received.stop - received.start
            matrix = edges(begin, count)
            pieces.append(
                Piece(
                    give=halo.give[to][sent],
                    send=_only(to, sent.stop - sent.start, size),
                    receive=_only(by, count, size),
                    targets=[to],
                    sources=[by],
                    going_on=going_on(matrix),
                    transposed=by_rows(matrix.t().coalesce()),
                    is_short=False,
                )
            )
            begin += count
    return pieces


def _slice(count: int, number: int, slices: int) -> slice:
    """Slice ``number`` of so many, nearly equal ones."""
    return slice(count * number // slices, count * (number + 1) // slices)


def _only(rank: int, count: int, size: int) -> list[int]:
    """``count`` for one rank, and nothing for the others."""
    return [count if one == rank else 0 for one in range(size)]
