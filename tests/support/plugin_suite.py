"""The suite that every plugin must pass, whoever wrote it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_type_hints

from bytesched.figures import Figures

STATS: Mapping[str, type] = get_type_hints(Figures)
"""What `stats()` of every plugin has, and of which type."""


@dataclass(frozen=True)
class TrainingRun:
    """A training run in callables, plain until ``wrap`` is called.

    Two runs of one factory do exactly the same: same seed, same data, same start.
    """

    #: one whole training step
    step: Callable[[], object]
    #: all that a script could read (weights, buffers, optimizer state, losses so far), as values
    #: that `==` compares bit for bit, such as bytes
    state: Callable[[], Mapping[str, object]]
    #: what wrapping changes in the user's objects: hooks, classes, attributes
    footprint: Callable[[], Mapping[str, object]]
    wrap: Callable[[], object]
    flush: Callable[[], object]
    unwrap: Callable[[], object]
    stats: Callable[[], Mapping[str, int | float | str]]


class PluginContract:
    """A wrapped run is the plain run, only faster. Supply `training`."""

    #: steps of a run; enough for a plugin to learn, to plan and to schedule
    steps = 6

    def training(self) -> TrainingRun:
        """A new run, plain, at its start."""
        raise NotImplementedError

    def test_flush_is_idempotent(self) -> None:
        plain, wrapped = self.training(), self.training()
        _check_equal(wrapped.state(), plain.state(), "of two plain runs at their start")
        wrapped.wrap()
        try:
            wrapped.flush()
            for step in self._steps(plain, wrapped):
                wrapped.flush()
                _check_equal(wrapped.state(), plain.state(), f"flushed after step {step}")
                wrapped.flush()
                _check_equal(wrapped.state(), plain.state(), f"flushed twice after step {step}")
        finally:
            wrapped.unwrap()

    def test_unwrap_restores(self) -> None:
        plain, wrapped = self.training(), self.training()
        before = dict(wrapped.footprint())
        wrapped.wrap()
        try:
            assert dict(wrapped.footprint()) != before, "the footprint does not show the wrap"
            assert len(list(self._steps(plain, wrapped))) == self.steps
        finally:
            wrapped.unwrap()
        _check_equal(wrapped.footprint(), before, "after unwrap")
        _check_equal(wrapped.state(), plain.state(), "after unwrap")
        for step in self._steps(plain, wrapped):
            _check_equal(wrapped.state(), plain.state(), f"in step {step} after unwrap")

    def test_stats_has_every_figure(self) -> None:
        wrapped = self.training()
        wrapped.wrap()
        try:
            self._check_stats(wrapped.stats(), steps=0)
            for _ in range(self.steps):
                wrapped.step()
            self._check_stats(wrapped.stats(), steps=self.steps)
        finally:
            wrapped.unwrap()

    def _steps(self, plain: TrainingRun, wrapped: TrainingRun) -> Iterator[int]:
        for step in range(self.steps):
            plain.step()
            wrapped.step()
            yield step

    def _check_stats(self, stats: Mapping[str, int | float | str], *, steps: int) -> None:
        assert not (missing := STATS.keys() - stats.keys()), f"stats lack {sorted(missing)}"
        for name, value in stats.items():
            kind = STATS.get(name, (int, float, str))
            fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
            assert fits, f"{name} is {value!r}, not {kind}"
            assert isinstance(value, str) or math.isfinite(value), f"{name} is {value}"
        assert stats["steps"] == steps, f"{stats['steps']} steps of {steps} were counted"


def _check_equal(mine: Mapping[str, object], plain: Mapping[str, object], when: str) -> None:
    assert mine.keys() == plain.keys(), f"{when}: other keys: {sorted(mine.keys() ^ plain.keys())}"
    differing = [name for name in plain if mine[name] != plain[name]]
    assert not differing, f"{when}: {len(differing)} of {len(plain)} differ: {differing[:8]}"
