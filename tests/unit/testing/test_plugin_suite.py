"""The plugin contract, over a toy plugin in plain Python and over ways to get one wrong."""

from __future__ import annotations

import pytest

from bytesched.testing import STATS, PluginContract, TrainingRun


class Toy:
    """A model of numbers whose wrapped optimizer applies its updates late, on first look."""

    def __init__(self) -> None:
        self.weights = [float(place) for place in range(4)]
        self.hooks: list[str] = []
        self.steps = 0
        self.pending: list[float] = []
        self.counted = 0

    def step(self) -> None:
        self.apply()
        self.steps += 1
        gradients = [weight * 0.1 + self.steps for weight in self.weights]
        if self.hooks:
            self.counted += 1
            self.pending = gradients
        else:
            self.update(gradients)

    def update(self, gradients: list[float]) -> None:
        self.weights = [w - 0.5 * g for w, g in zip(self.weights, gradients, strict=True)]

    def apply(self) -> None:
        gradients, self.pending = self.pending, []
        if gradients:
            self.update(gradients)

    def state(self) -> dict[str, object]:
        self.apply()
        return {f"w{place}": weight.hex() for place, weight in enumerate(self.weights)}

    def wrap(self) -> None:
        self.hooks = ["forward", "backward"]

    def flush(self) -> None:
        self.apply()

    def unwrap(self) -> None:
        self.apply()
        self.hooks = []

    def footprint(self) -> dict[str, object]:
        return {"hooks": tuple(self.hooks)}

    def stats(self) -> dict[str, int | float | str]:
        stats: dict[str, int | float | str] = {name: kind() for name, kind in STATS.items()}
        return stats | {"steps": self.counted, "wait_ms/layer": 0.5}


def run_of(toy: Toy) -> TrainingRun:
    return TrainingRun(
        step=toy.step,
        state=toy.state,
        footprint=toy.footprint,
        wrap=toy.wrap,
        flush=toy.flush,
        unwrap=toy.unwrap,
        stats=toy.stats,
    )


class TestToyPlugin(PluginContract):
    def training(self) -> TrainingRun:
        return run_of(Toy())


class Stale(Toy):
    def state(self) -> dict[str, object]:
        return {f"w{place}": weight.hex() for place, weight in enumerate(self.weights)}


class Drops(Toy):
    def step(self) -> None:
        if self.hooks:
            self.pending = []
        super().step()


class AlmostEqual(Toy):
    def update(self, gradients: list[float]) -> None:
        super().update([g * (1 + 1e-15) for g in gradients] if self.hooks else gradients)


class FlushesTwice(Toy):
    def flush(self) -> None:
        kept = self.pending
        self.apply()
        self.pending = kept
        if not kept and self.hooks:
            self.weights[0] += 1


class KeepsAHook(Toy):
    def unwrap(self) -> None:
        super().unwrap()
        self.hooks = ["backward"]


class LosesTheLastStep(Toy):
    def unwrap(self) -> None:
        self.pending = []
        super().unwrap()


class HiddenWrap(Toy):
    def footprint(self) -> dict[str, object]:
        return {}


class NoFigures(Toy):
    def stats(self) -> dict[str, int | float | str]:
        return {"steps": self.counted}


class WrongCount(Toy):
    def stats(self) -> dict[str, int | float | str]:
        return super().stats() | {"steps": 3}


class NotFinite(Toy):
    def stats(self) -> dict[str, int | float | str]:
        return super().stats() | {"comm_ms": float("nan")}


class WrongKind(Toy):
    def stats(self) -> dict[str, int | float | str]:
        return super().stats() | {"mode": 3}


class ForgetsAKey(Toy):
    def state(self) -> dict[str, object]:
        state = super().state()
        if self.hooks and self.steps:
            del state["w3"]
        return state


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Stale, "test_every_step_equals_plain"),
        (Drops, "test_steps_without_a_look_between_equal_plain"),
        (AlmostEqual, "test_every_step_equals_plain"),
        (ForgetsAKey, "test_every_step_equals_plain"),
        (FlushesTwice, "test_flush_is_idempotent"),
        (KeepsAHook, "test_unwrap_restores"),
        (LosesTheLastStep, "test_unwrap_restores"),
        (HiddenWrap, "test_unwrap_restores"),
        (NoFigures, "test_stats_has_every_figure"),
        (WrongCount, "test_stats_has_every_figure"),
        (NotFinite, "test_stats_has_every_figure"),
        (WrongKind, "test_stats_has_every_figure"),
    ],
)
def test_the_contract_is_failed_by(broken: type[Toy], test: str) -> None:
    class Broken(PluginContract):
        def training(self) -> TrainingRun:
            return run_of(broken())

    with pytest.raises(AssertionError):
        getattr(Broken(), test)()


def test_two_runs_that_start_apart_are_no_test() -> None:
    class Apart(PluginContract):
        made = 0

        def training(self) -> TrainingRun:
            toy = Toy()
            toy.weights[0] = float(self.made)
            self.made += 1
            return run_of(toy)

    with pytest.raises(AssertionError, match="two plain runs"):
        Apart().test_every_step_equals_plain()
