"""The search: ask for a setting to try, tell what a step took under it.

It holds no clock and starts nothing, so the same search runs inside a training loop, a simulation
or a test. With the same seed and the same answers, it asks the same questions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from bytesched.tunable import Setting

from .space import Space

__all__ = ["Search"]

#: costs told before a surface through them says anything
_SURFACE = 4
#: what the surface counts in, as a share of the first cost; what is worse by more than so many of
#: them is only known to be bad; and the variance of a measurement
_UNIT = 0.1
_WORST = 4.0
_NOISE = 0.01
#: of a surface, and of what it is made of; a coordinate goes from 0 to 1
_VARIANCES = (0.3, 1.0, 3.0, 10.0)
_SCALES = (0.1, 0.2, 0.4, 0.8, 1.6)
#: less of the best cost is not worth a trial
_LEAST_GAIN = 0.001


class Search:
    """Proposes settings of one space, each at most once.

    Args:
        first: what is proposed first, where it lies in the space. After that, and as many at random
            as a surface needs, every proposal is the untried setting that promises most: a Gaussian
            process over the logarithm of the cost says how much it may gain.
    """

    def __init__(self, space: Space, *, seed: int = 0, first: Sequence[Setting] = ()) -> None:
        self.space = space
        self._first = [setting for setting in dict.fromkeys(first) if setting in space]
        self._random = random.Random(seed)
        self._costs: dict[Setting, list[float]] = {}
        self._proposed: Setting | None = None

    def ask(self) -> Setting | None:
        """The next setting to try; None if none is worth it. The same until something is told."""
        if self._proposed is None or self._proposed in self._costs:
            first = [setting for setting in self._first if setting not in self._costs]
            untold = [setting for setting in self.space.settings if setting not in self._costs]
            self._proposed = first[0] if first else self._propose(untold) if untold else None
        return self._proposed

    def tell(self, setting: Setting, cost_s: float) -> None:
        """A step took ``cost_s`` under ``setting``, which need not have been proposed."""
        if not 0 < cost_s < math.inf:
            raise ValueError(f"a step does not take {cost_s} s")
        self._costs.setdefault(setting, []).append(cost_s)

    def _propose(self, untold: Sequence[Setting]) -> Setting | None:
        told = [setting for setting in self._costs if setting in self.space]
        if len(told) < _SURFACE or not self.space.dimensions:
            return self._random.choice(untold)
        unit_s = next(iter(self._costs.values()))[0]
        heights = [
            min(math.log(fmean(self._costs[setting]) / unit_s) / _UNIT, _WORST) for setting in told
        ]
        surface = _surface(list(map(self.space.coordinates, told)), heights)
        gains = [
            _improvement(min(heights), *surface(self.space.coordinates(setting)))
            for setting in untold
        ]
        # Of the logarithm, a small one is the same share of the cost.
        most = max(gains)
        return untold[gains.index(most)] if _UNIT * most > _LEAST_GAIN else None


def _surface(
    points: Sequence[Sequence[float]], heights: Sequence[float]
) -> Callable[[Sequence[float]], tuple[float, float]]:
    """A Gaussian process through ``heights``: its mean and deviation at any point.

    Of all variances and scales, those under which the heights are most likely.
    """
    import numpy as np

    at, known = np.array(points), np.array(heights)

    def covariance(one: Any, other: Any, variance: float, scales: Sequence[float]) -> Any:
        """Matern's, for functions that are smooth twice."""
        apart = (one[:, None, :] - other[None, :, :]) / np.array(scales)
        distance = np.sqrt(5 * (apart**2).sum(axis=2))
        return variance * (1 + distance + distance**2 / 3) * np.exp(-distance)

    best: tuple[float, Any] = (-math.inf, None)
    for variance, *scales in product(_VARIANCES, *[_SCALES] * at.shape[1]):
        whole = covariance(at, at, variance, scales) + _NOISE * np.eye(len(at))
        lower = np.linalg.cholesky(whole)
        weights = np.linalg.solve(whole, known)
        likelihood = -0.5 * known @ weights - np.log(np.diag(lower)).sum()
        if likelihood > best[0]:
            best = likelihood, (variance, scales, whole, weights)
    variance, scales, whole, weights = best[1]

    def value(point: Sequence[float]) -> tuple[float, float]:
        shared = covariance(np.array([point]), at, variance, scales)[0]
        left = variance - shared @ np.linalg.solve(whole, shared)
        return float(shared @ weights), math.sqrt(max(left, _NOISE**2))

    return value


def _improvement(best: float, mean: float, deviation: float) -> float:
    """By how much a value of that mean and deviation is expected to be below the best."""
    below = (best - mean) / deviation
    density = math.exp(-(below**2) / 2) / math.sqrt(2 * math.pi)
    return deviation * (below * (1 + math.erf(below / math.sqrt(2))) / 2 + density)
