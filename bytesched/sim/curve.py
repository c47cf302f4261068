"""Cases: one model on one fabric; and what changes along an axis of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from bytesched.bench.systems import System
from bytesched.course import PLANNED_AFTER
from bytesched.link.fabric import Fabric
from bytesched.sim.exchanges import predict_exchanging
from bytesched.sim.predict import Prediction, predict
from bytesched.sim.systems import Model
from bytesched.sim.weather import Climate

__all__ = ["AXES", "LEAST_ITERATIONS", "Axis", "Case", "sweep"]

#: in their second half, which counts, an order has been planned
LEAST_ITERATIONS: Final = 2 * (PLANNED_AFTER + 1)
_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Case:
    """Systems that train one model on one fabric in one climate."""

    model: Model
    fabric: Fabric
    systems: tuple[System, ...]
    climate: Climate
    #: in a climate that changes
    changing: int
    alike: int = LEAST_ITERATIONS

    @property
    def iterations(self) -> int:
        """How many are simulated."""
        return self.alike if self.climate.is_calm else self.changing

    @property
    def ratio(self) -> float:
        """Communication over compute."""
        profile = self.model.profile
        return profile.nbytes / self.fabric.gradient_bytes_per_s / profile.compute_s

    def predictions(self) -> list[Prediction]:
        """One for each system."""
        if self.model.profile.exchanged_bytes:
            return [predict_exchanging(one, self.model, self.fabric) for one in self.systems]
        weather = list(self.climate.weather(self.fabric.ranks, self.iterations))
        return [predict(system, self.model, self.fabric, weather) for system in self.systems]

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
