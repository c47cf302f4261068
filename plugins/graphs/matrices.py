"""Sparse matrices whose products add up in one fixed order, so that equal inputs give equal bits.

A product adds each row's entries by column, one after the other, beginning at zero or at what is
there: a row summed in several products has the bits of one product over all of its columns.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

__all__ = ["added", "by_rows", "entries", "product"]


def entries(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """The matrix in coordinates, sorted by row and column; what is given twice is added up."""
    places = torch.stack([rows, columns])
    return torch.sparse_coo_tensor(places, values, shape, check_invariants=False).coalesce()


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


def added(total: Tensor, matrix: Tensor, x: Tensor) -> None:
    """Adds ``matrix @ x`` to ``total``, of a matrix of `entries`."""
    if matrix._nnz():
        total.addmm_(matrix, x)
