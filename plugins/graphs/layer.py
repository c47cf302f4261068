"""A graph convolution over vertices that ranks share out: sums over neighbours as rows arrive."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from bytesched.observe import Observers

from ..planned.session import PlannedSession
from ..registry import sessions
from .partition import Partition
from .pieces import product

#: what a stretch of time goes to
Kind = Literal["aggregation", "transformation", "halo"]


class Laps:
    """A clock that says what each stretch since the last one went to."""

    def __init__(self, observers: Sequence[Observers]) -> None:
        self._observers = observers
        self._at_ns = perf_counter_ns() if observers else 0

    def lap(self, kind: Kind) -> None:
        """What has passed since the last call, or since the beginning, went to ``kind``."""
        if not self._observers:
            return
        now_ns = perf_counter_ns()
        for observers in self._observers:
            observers.on_span("graph", kind, self._at_ns, now_ns)
        self._at_ns = now_ns

    def watch_backward(self, y: Tensor, kind: Kind) -> None:
        """The same for the backward pass of the operation that has made ``y``."""
        if self._observers and (node := y.grad_fn) is not None:
            node.register_prehook(lambda _: self._begin())
            node.register_hook(lambda *_: self.lap(kind))

    def _begin(self) -> None:
        self._at_ns = perf_counter_ns()


def laps() -> Laps:
    """A clock that begins now, for the sessions of this process that are traced."""
    return Laps(
        [
            session.observers
            for session in sessions()
            if isinstance(session, PlannedSession) and session.observers
        ]
    )


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


@dataclass(frozen=True)
class _Kept:
    """What was aggregated of inputs that do not change."""

    inputs: weakref.ref[Tensor]
    version: int
    aggregated: Tensor


class GraphConv(nn.Module):
    """``A x W + b``, of the weights A of a partition's edges (Kipf and Welling, ICLR 2017).

    ``x`` has a row for each vertex of this rank. Rows are aggregated where they are narrower,
    before or after W. Every rank calls its layers in the same order as the others, also if it has
    no vertices. Gradients of W are those of this rank's vertices: `bytesched.wrap` reduces them.

    Args:
        partition: what each rank has and needs.
        in_features: width of ``x``.
        out_features: width of the result.
        bias: whether there is a b.
        is_first: ``x`` is the graph's own: aggregation comes before W and, while the same tensor
            is given again and needs no gradient, is done once. Its halo is then received once.
    """

    def __init__(
        self,
        partition: Partition,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        is_first: bool = False,
    ) -> None:
        super().__init__()
        self.partition = partition
        self.is_first = is_first
        self.aggregates_first = is_first or in_features < out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=partition.dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=partition.dtype)) if bias else None
        nn.init.xavier_uniform_(self.weight)
        self._kept: _Kept | None = None

    def forward(self, x: Tensor) -> Tensor:
        """A row for each vertex of this rank; collective. Raises what `aggregate` raises."""
        if self.aggregates_first:
            return self._transformed(self._aggregated(x), self.bias)
        y = aggregate(self.partition, self._transformed(x, None))
        return y if self.bias is None else y + self.bias

    def _transformed(self, x: Tensor, bias: Tensor | None) -> Tensor:
        clock = laps()
        y = functional.linear(x, self.weight, bias)
        clock.lap("transformation")
        clock.watch_backward(y, "transformation")
        return y

    def _aggregated(self, x: Tensor) -> Tensor:
        kept = self._kept
        if kept is not None and kept.inputs() is x and kept.version == x._version:
            return kept.aggregated
        y = aggregate(self.partition, x)
        if self.is_first and not x.requires_grad and not y.is_inference():
            self._kept = _Kept(weakref.ref(x), x._version, y)
        return y

    def extra_repr(self) -> str:
        """Shape, graph and order."""
        order = "aggregates first" if self.aggregates_first else "transforms first"
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, {order}, {self.partition!r}"
