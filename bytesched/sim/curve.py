"""Cases: one model on one fabric, whose ranks differ; and what changes along an axis."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bytesched.bench.systems import System
from bytesched.link.cluster import LEAST_ITERATIONS
from bytesched.link.fabric import Fabric
from bytesched.sim.exchanges import predict_exchanging
from bytesched.sim.predict import Prediction, predict
from bytesched.sim.systems import Model

__all__ = ["AXES", "Axis", "Case", "Climate", "sweep"]

_SEED = 0
_GBIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Climate:
    """How ranks differ from each other and from one iteration to the next; for every system."""

    #: standard deviation of the logarithm of a rank's pace in an iteration
    jitter: float = 0.0
    #: one rank always computes so many times as long
    late: float = 1.0

    def paces(self, ranks: int, iterations: int) -> list[list[float]]:
        """How many times as long each rank computes; those that are alike are one or two."""
        chance = random.Random(_SEED)
        paces = []
        for _ in range(iterations):
            count = ranks if self.jitter else 2
            pace = [chance.lognormvariate(0.0, self.jitter) for _ in range(count)]
            pace[0] *= self.late
            paces.append(pace)
        return paces


@dataclass(frozen=True)
class Case:
    """Systems that train one model on one fabric in one climate."""

    model: Model
    fabric: Fabric
    systems: tuple[System, ...]
    climate: Climate
    #: where they differ
    changing: int

    @property
    def paces(self) -> list[list[float]]:
        """Of ranks in each iteration that is simulated."""
        count = self.changing if self.climate.jitter else LEAST_ITERATIONS
        return self.climate.paces(self.fabric.ranks, count)

    @property
    def ratio(self) -> float:
        """Communication over compute."""
        profile = self.model.profile
        return profile.nbytes / self.fabric.gradient_bytes_per_s / profile.compute_s

    def predictions(self) -> list[Prediction]:
        """One for each system."""
        if self.model.profile.exchanged_bytes:
            return [predict_exchanging(one, self.model, self.fabric) for one in self.systems]
        return [predict(system, self.model, self.fabric, self.paces) for system in self.systems]

    def with_ranks(self, ranks: float) -> Case:
        """The same among so many ranks."""
        return replace(self, fabric=replace(self.fabric, ranks=int(ranks)))

    def with_bandwidth(self, gbit: float) -> Case:
        """The same with links of so many Gbit/s."""
        return replace(self, fabric=replace(self.fabric, bytes_per_s=gbit * _GBIT))

    def with_ratio(self, ratio: float) -> Case:
        """The same on a device on which communication takes so many times as long as compute."""
        profile = self.model.profile.scaled(self.ratio / ratio)
        return replace(self, model=replace(self.model, profile=profile))


class Axis(NamedTuple):
    """What a sweep changes."""

    title: str
    points: Sequence[float]
    at: Callable[[Case, float], Case]


AXES = {
    "ranks": Axis("ranks", [2**n for n in range(1, 11)], Case.with_ranks),
    "bandwidth": Axis(
        "Gbit/s of each link", [1, 2.5, 5, 10, 25, 50, 100, 200, 400], Case.with_bandwidth
    ),
    "ratio": Axis(
        "communication over compute",
        [0.1, 0.25, 0.5, 0.7, 0.85, 1, 1.25, 1.5, 2, 3, 4, 8],
        Case.with_ratio,
    ),
}


def sweep(case: Case, axis: Axis) -> list[tuple[float, list[Prediction]]]:
    """The predictions at every point of an axis."""
    return [(point, axis.at(case, point).predictions()) for point in axis.points]
