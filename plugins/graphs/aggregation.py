"""Sums over neighbours, while those of other ranks are on their way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .laps import laps
from .partition import Partition
from .pieces import product


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, partition: Partition) -> Tensor:
        ctx.partition = partition
        clock = laps()
        x = x.detach().contiguous()
        peers, pieces = partition.peers, partition.pieces(_row_bytes(x))
        arriving = [
            peers.start(x[piece.give], piece.send, piece.receive, "halo", is_urgent=True)
            for piece in pieces
            if peers is not None
        ]
        clock.lap("halo")
        total = product(partition.inner, x)
        clock.lap("aggregation")
        for piece, transfer in zip(pieces, arriving, strict=True):
            rows = transfer.wait()
            clock.lap("halo")
            total = product(piece.going_on, torch.cat([total, rows]))
            clock.lap("aggregation")
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        partition: Partition = ctx.partition
        clock = laps()
        gradient = gradient.contiguous()
        peers, pieces = partition.peers, partition.pieces(_row_bytes(gradient))
        arriving = []
        for piece in pieces:
            assert peers is not None
            of_halo = product(piece.transposed, gradient)
            clock.lap("aggregation")
            arriving.append(
                peers.start(of_halo, piece.receive, piece.send, "halo backward", is_urgent=True)
            )
            clock.lap("halo")
        total = product(partition.inner_transposed, gradient)
        clock.lap("aggregation")
        for piece, transfer in zip(pieces, arriving, strict=True):
            rows = transfer.wait()
            clock.lap("halo")
            # No place twice, so no order to keep.
            total.index_add_(0, piece.give, rows)
            clock.lap("aggregation")
        return total, None


def aggregate(partition: Partition, x: Tensor) -> Tensor:
    """For each vertex of this rank, the weighted sum of ``x`` where its edges come from.

    ``y[i] = sum_j weight(j -> i) * x[j]``, over all ranks; collective. Rows for others leave in
    pieces, inner rows are aggregated meanwhile, then pieces are added in one order as they come.
    Backwards, gradients of rows leave for their owners piece by piece, and the gradient of inner
    rows is computed meanwhile. Sums run over own neighbours first, then over those of others, so
    that equal inputs give equal bits wherever a halo is cut.

    Args:
        partition: what each rank has and needs.
        x: a row for each vertex of this rank, of the dtype of the weights.

    Returns:
        a row for each vertex of this rank.

    Raises:
        MismatchError: on all ranks alike, if rows do not fit, before they are sent.
        PeerLost: a rank is gone.
        SchedulerTimeout: a rank does not come within ``BYTESCHED_TIMEOUT_S``.
    """
    partition.check(x)
    return _Aggregate.apply(x, partition)  # type: ignore[no-any-return, no-untyped-call]


def _row_bytes(x: Tensor) -> int:
    return max(1, x.shape[1] * x.element_size())
