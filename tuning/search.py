"""The search: ask for a setting to try, tell what a step took under it.

It holds no clock and starts nothing, so the same search runs inside a training loop, a simulation
or a test. With the same seed and the same answers, it asks the same questions.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from statistics import fmean

from bytesched.tunable import Setting

from .space import Space

#: costs told before a surface through them says anything
_SURFACE = 4
#: what the surface counts in, as a share of the first cost; what is worse by more than so many of
#: them is only known to be bad; and the variance of a measurement
_UNIT = 0.1
_WORST = 4.0
_NOISE = 0.01
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
        self._seed = seed
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
        if len(told) < _SURFACE:
            return self._random.choice(untold)
        drawn = random.getstate()
        from scipy.stats import norm
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern

        # Importing them draws a number, and scripts draw data alike on ranks that tune and others.
        random.setstate(drawn)
        unit_s = next(iter(self._costs.values()))[0]
        heights = [
            min(math.log(fmean(self._costs[setting]) / unit_s) / _UNIT, _WORST) for setting in told
        ]
        scales = Matern([0.3, 0.3], (0.1, 2.0), nu=2.5)
        process = GaussianProcessRegressor(
            ConstantKernel(1.0, (0.1, 20.0)) * scales,
            alpha=_NOISE,
            n_restarts_optimizer=1,
            random_state=self._seed,
        )
        with warnings.catch_warnings():
            # A scale at one of its bounds is as good as another.
            warnings.simplefilter("ignore")
            process.fit([self.space.coordinates(setting) for setting in told], heights)
        mean, deviation = process.predict(
            [self.space.coordinates(setting) for setting in untold], return_std=True
        )
        lower = (min(heights) - mean) / deviation
        # The expected improvement. Of the logarithm, a small one is the same share of the cost.
        gains = _UNIT * deviation * (lower * norm.cdf(lower) + norm.pdf(lower))
        promising = int(gains.argmax())
        return untold[promising] if gains[promising] > _LEAST_GAIN else None
