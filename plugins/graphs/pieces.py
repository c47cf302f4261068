"""A halo, cut into pieces that each cross one pair of ranks; and the matrices of their edges.

Products of these matrices add up in one fixed order, so that equal inputs give equal bits: each
row's entries by column, one after the other. So a sum that goes on in another product, whose first
column is the sum so far, has the bits of one product over all columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def entries(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """The matrix in coordinates, sorted by row and column; what is given twice is added up."""
    places = torch.stack([rows, columns])
    return torch.sparse_coo_tensor(places, values, shape, check_invariants=False).coalesce()


def going_on(matrix: Tensor) -> Tensor:
    """With ``[total, x]`` below each other, what gives ``total + matrix @ x``; by rows."""
    rows, columns = matrix.indices()
    own, width = matrix.shape
    itself = torch.arange(own, device=rows.device)
    ones = torch.ones(own, dtype=matrix.dtype, device=rows.device)
    return by_rows(
        entries(
            torch.cat([itself, rows]),
            torch.cat([itself, own + columns]),
            torch.cat([ones, matrix.values()]),
            (own, own + width),
        )
    )


def by_rows(matrix: Tensor) -> Tensor:
    """The same matrix, by rows."""
    with warnings.catch_warnings():
        # Once in a process, torch says that the layout is in beta.
        warnings.simplefilter("ignore", UserWarning)
        return matrix.to_sparse_csr()


def product(matrix: Tensor, x: Tensor) -> Tensor:
    """``matrix @ x``, of a matrix `by_rows`."""
    if x.device.type == "cpu":
        # In the order of columns, and on all threads; without it, MKL chooses the order.
        total: Tensor = torch.sparse.mm(matrix, x, "sum")
    else:
        total = torch.sparse.mm(matrix, x)
    return total


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
