"""Searchers: ask for a setting to try, tell what a step took under it.

They hold no clock and start nothing, so the same search runs inside a training loop, a simulation
or a test. With the same seed and the same answers, they ask the same questions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Protocol

from bytesched.errors import ConfigError
from bytesched.tunable import Setting

from .space import Space

__all__ = ["BayesianSearch", "RandomSearch", "Searcher"]


#: costs told before a surface through them says anything
_SURFACE = 4
#: what the surface counts in, as a share of the first cost; what is worse by more than so many of
#: them is only known to be bad; and the variance of a measurement
_UNIT = 0.1
_WORST = 4.0
_NOISE = 0.01


class Searcher(Protocol):
    """Proposes settings of one space, each at most once."""

    def ask(self) -> Setting | None:
        """The next setting to try; None if none is worth it. The same until something is told."""

    def tell(self, setting: Setting, cost_s: float) -> None:
        """A step took `cost_s` under `setting`, which need not have been proposed."""

    def best(self) -> tuple[Setting, float] | None:
        """The cheapest setting told, and its cost; the mean if it was told several times."""


class _Told:
    """What all searchers keep: costs by setting, and the proposal that is open."""

    def __init__(self, space: Space, first: Sequence[Setting]) -> None:
        self.space = space
        self._first = [setting for setting in dict.fromkeys(first) if setting in space]
        self._costs: dict[Setting, list[float]] = {}
        self._proposed: Setting | None = None

    def ask(self) -> Setting | None:
        if self._proposed is None or self._proposed in self._costs:
            first = [setting for setting in self._first if setting not in self._costs]
            self._proposed = first[0] if first else self._propose(self._untold())
        return self._proposed

    def tell(self, setting: Setting, cost_s: float) -> None:
        if not 0 < cost_s < math.inf:
            raise ValueError(f"a step does not take {cost_s} s")
        self._costs.setdefault(setting, []).append(cost_s)

    def best(self) -> tuple[Setting, float] | None:
        means = {setting: sum(costs) / len(costs) for setting, costs in self._costs.items()}
        if not means:
            return None
        setting = min(means, key=lambda told: means[told])
        return setting, means[setting]

    def _untold(self) -> list[Setting]:
        return [setting for setting in self.space.settings if setting not in self._costs]

    def _propose(self, untold: list[Setting]) -> Setting | None:
        raise NotImplementedError


class RandomSearch(_Told):
    """Any setting that was not tried, each as likely."""

    def __init__(self, space: Space, *, seed: int = 0, first: Sequence[Setting] = ()) -> None:
        super().__init__(space, first)
        self._order = list(space.settings)
        random.Random(seed).shuffle(self._order)

    def _propose(self, untold: list[Setting]) -> Setting | None:
        return next((setting for setting in self._order if setting not in self._costs), None)


class BayesianSearch(_Told):
    """A Gaussian process over the logarithm of the cost, and the largest expected improvement.

    After `first`, and as many at random as a surface needs, every proposal is the untried setting
    that promises most. There is none left when that is less than `least_gain` of the best cost.

    Raises `ConfigError` if scikit-optimize is not installed.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int = 0,
        first: Sequence[Setting] = (),
        least_gain: float = 0.001,
    ) -> None:
        super().__init__(space, first)
        self._least_gain = least_gain
        self._random = random.Random(seed)
        self._first_cost_s = 0.0
        drawn = random.getstate()
        try:
            import numpy as np
            from skopt import Optimizer
            from skopt.acquisition import gaussian_ei
            from skopt.learning import GaussianProcessRegressor
            from skopt.learning.gaussian_process.kernels import ConstantKernel, Matern
        except ImportError as error:
            raise ConfigError(
                "tuning needs scikit-optimize: pip install 'bytesched[tune]'"
            ) from error
        finally:
            # What is imported there draws a number, and the script may draw its data in step on all
            # ranks, of which only one tunes.
            random.setstate(drawn)
        self._array: Any = np.array
        self._expected_improvement: Any = gaussian_ei
        self._optimizer: Any = None
        if not space.dimensions:
            return
        scales = Matern([0.3] * space.dimensions, (0.1, 2.0), nu=2.5)
        process = GaussianProcessRegressor(
            ConstantKernel(1.0, (0.1, 20.0)) * scales,
            noise=_NOISE,
            n_restarts_optimizer=1,
            random_state=seed,
        )
        self._optimizer = Optimizer(
            [(0.0, 1.0)] * space.dimensions,
            base_estimator=process,
            acq_func="EI",
            acq_optimizer="sampling",
            # Proposals are picked from the space's own list, below.
            acq_optimizer_kwargs={"n_points": 1},
            n_initial_points=0,
            initial_point_generator="random",
            model_queue_size=1,
            random_state=seed,
        )

    def tell(self, setting: Setting, cost_s: float) -> None:
        super().tell(setting, cost_s)
        self._first_cost_s = self._first_cost_s or cost_s
        if self._optimizer is not None and setting in self.space:
            height = math.log(cost_s / self._first_cost_s) / _UNIT
            self._optimizer.tell(self.space.coordinates(setting), min(height, _WORST))

    def _propose(self, untold: list[Setting]) -> Setting | None:
        if not untold:
            return None
        if self._optimizer is None or len(self._optimizer.yi) < _SURFACE:
            return self._random.choice(untold)
        points = self._array([self.space.coordinates(setting) for setting in untold])
        gains = self._expected_improvement(
            points, self._optimizer.models[-1], y_opt=min(self._optimizer.yi), xi=0.0
        )
        promising = int(gains.argmax())
        # A small gain of the logarithm is the same share of the cost.
        return untold[promising] if gains[promising] * _UNIT > self._least_gain else None
