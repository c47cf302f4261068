"""A graph convolution over vertices that ranks share out."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .aggregation import aggregate, laps
from .partition import Partition


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
