"""Branches between two layers, as a module that runs anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

__all__ = ["Branched"]


def _sum(outputs: Sequence[Tensor]) -> Tensor:
    return reduce(add, outputs)


def _concatenation(outputs: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(outputs), dim=1)


class Branched(nn.Module):
    """Sequences that read the same tensor; their outputs are joined. An empty one is a shortcut.

    Args:
        join: "sum", or "concat" along the channels.
    """

    def __init__(self, *branches: nn.Sequential, join: str = "sum") -> None:
        super().__init__()
        joins: dict[str, Callable[[Sequence[Tensor]], Tensor]]
        joins = {"sum": _sum, "concat": _concatenation}
        if join not in joins:
            raise ValueError(f"join {join!r}: one of {', '.join(joins)}")
        self.branches = nn.ModuleList(branches)
        self.join = joins[join]

    def forward(self, x: Tensor) -> Tensor:
        """The joined outputs of all branches."""
        return self.join([branch(x) for branch in self.branches])
