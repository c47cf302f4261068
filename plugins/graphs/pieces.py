"""A halo, cut into pieces that each cross one pair of ranks."""

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


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows for one rank, and some from another one."""

    #: the places of own rows that are sent; no place twice
    give: Tensor
    #: how many rows each rank gets, and sends
    send: list[int]
    receive: list[int]
    #: from a sum so far, and the rows received below it, to the sum with these
    going_on: Tensor
    #: edges of the rows received, from own vertices to those rows, by rows
    transposed: Tensor


def cut(halo: Halo, most_rows: int) -> list[Piece]:
    """The pieces, in each of which no rank sends more than ``most_rows``; as many on all ranks.

    The first ones go to the next rank and come from the one before, then to the second next and so
    on. The halo keeps its order, so that sums do not depend on where it is cut.
    """
    size, mine = len(halo.counts), halo.rank
    # By column, so that the edges of a piece lie side by side.
    rows, columns = halo.matrix.indices()
    columns, order = columns.sort(stable=True)
    rows, values = rows[order], halo.matrix.values()[order]
    pieces: list[Piece] = []
    begin = 0
    for distance in range(1, size):
        to, by = (mine + distance) % size, (mine - distance) % size
        longest = max(halo.counts[(rank + distance) % size][rank] for rank in range(size))
        slices = -(-longest // most_rows)
        for number in range(slices):
            sent = _slice(len(halo.give[to]), number, slices)
            received = _slice(halo.counts[mine][by], number, slices)
            count = received.stop - received.start
            first, last = torch.searchsorted(
                columns, columns.new_tensor([begin, begin + count])
            ).tolist()
            matrix = entries(
                rows[first:last],
                columns[first:last] - begin,
                values[first:last],
                (halo.matrix.shape[0], count),
            )
            pieces.append(
                Piece(
                    give=halo.give[to][sent],
                    send=_only(to, sent.stop - sent.start, size),
                    receive=_only(by, count, size),
                    going_on=going_on(matrix),
                    transposed=by_rows(matrix.t().coalesce()),
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
