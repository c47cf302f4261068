"""Where a chain of layers is cut: into parts whose longest one is as short as it can be."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor, nn

__all__ = ["balanced", "layer_times_s"]

_REPEATS = 3


def balanced(layers: int, parts: int, cost: Callable[[int, int], float]) -> list[int]:
    """The bounds of ``parts`` runs of layers, ``parts + 1`` of them, none of the runs empty.

    The largest ``cost(start, stop)`` of a run is the least that any cut has.
    """
    # best[stop]: of the first `stop` layers in so many parts, the largest cost and the last cut
    best: list[tuple[float, int]] = [(0.0, 0)] + [(math.inf, 0)] * layers
    cuts: list[list[int]] = []
    for _ in range(parts):
        following = [(math.inf, 0)] * (layers + 1)
        for stop in range(1, layers + 1):
            following[stop] = min(
                (max(best[start][0], cost(start, stop)), start) for start in range(stop)
            )
        cuts.append([start for _, start in following])
        best = following
    bounds = [layers]
    for starts in reversed(cuts):
        bounds.append(starts[bounds[-1]])
    return bounds[::-1]


def layer_times_s(layers: Sequence[nn.Module], inputs: Tensor) -> list[float]:
    """Seconds of forward and backward of each layer on ``inputs``, median of a few.

    Copies are timed, so that neither statistics nor random numbers change.
    """
    times = []
    x = inputs.detach()
    with torch.random.fork_rng():
        for layer in layers:
            twin = copy.deepcopy(layer)
            found = []
            for _ in range(_REPEATS):
                x_in = x.detach().requires_grad_(x.is_floating_point())
                # Layers that work in place may overwrite neither a leaf nor the next input.
                x_copy = x_in.clone()
                began_s = perf_counter()
                y = twin(x_copy)
                if y.requires_grad:
                    y.backward(torch.ones_like(y))
                found.append(perf_counter() - began_s)
            times.append(statistics.median(found))
            x = y.detach()
    return times
