"""Sparse matrices whose products add up in one fixed order, so that equal inputs give equal bits.

A product adds each row's entries by column, one after the other. So a sum that goes on in another
product, whose first column is the sum so far, has the bits of one product over all columns.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

__all__ = ["by_rows", "entries", "going_on", "product"]


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
