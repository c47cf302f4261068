"""Jobs whose tuner is a test's own: one that never rests, and one that does as it is told."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from training import Job

from bytesched import plugins
from bytesched.config import Config
from bytesched.plugins.planned import tuned
from bytesched.tunable import Decision, RunFacts, Setting, Steps, Tuner
from bytesched.tuning.online import find_tuner

SIZES = (64, 96, 256, 1000, 4096)


class Restless:
    """Changes what can be changed after every step or two."""

    def __init__(self) -> None:
        self._random = random.Random(4)
        self._facts: RunFacts
        self.settings: list[Setting] = []
        self.durations_s: list[float] = []

    def begin(self, facts: RunFacts) -> Decision:
        assert facts.probes
        assert sum(facts.ranks_per_host) > 1
        self._facts = facts
        return self._next()

    def decide(self, steps: Steps) -> Decision:
        assert len(steps.durations_s) == self._word.next_in_steps
        self.durations_s.extend(steps.durations_s)
        return self._next()

    def close(self) -> None:
        pass

    def _next(self) -> Decision:
        choose = self._random.choice
        knobs, untuned = self._facts.knobs, self._facts.untuned
        partition = choose(SIZES) if "partition_bytes" in knobs else untuned.partition_bytes
        setting = Setting(
            partition,
            partition * choose((1, 2, 3, 8)),
            choose(("priority", "fifo")) if "policy" in knobs else "priority",
            choose((True, True, False)) if "enabled" in knobs else True,
        )
        self.settings.append(setting)
        self._word = Decision(setting, choose((1, 1, 2)))
        return self._word


class Scripted:
    """Passes through given settings, each with its number of steps, and stays with the last."""

    def __init__(self, turns: Sequence[tuple[Setting, int]]) -> None:
        self._turns = list(turns)

    def begin(self, facts: RunFacts) -> Decision:
        return self._next()

    def decide(self, steps: Steps) -> Decision:
        return self._next()

    def close(self) -> None:
        pass

    def _next(self) -> Decision:
        setting, steps = self._turns.pop(0)
        return Decision(setting, steps if self._turns else 1 << 30)


class TunedJob(Job):
    """A job whose wrapped run has a tuner of ours."""

    def __init__(self, *, wrapped: bool, **fields: Any) -> None:
        super().__init__(wrapped=wrapped, **fields)
        if wrapped:
            self._fields |= {"tune": True}
            replace_tuner(self.new_tuner, checked=lambda config: None)

    def new_tuner(self, config: Config) -> Tuner:
        raise NotImplementedError

    def close(self) -> None:
        try:
            super().close()
        finally:
            replace_tuner(find_tuner)


class ScriptedJob(TunedJob):
    def __init__(
        self, *, wrapped: bool, turns: Sequence[tuple[Setting, int]] = (), **fields: Any
    ) -> None:
        super().__init__(wrapped=wrapped, **fields)
        self._turns = turns

    def new_tuner(self, config: Config) -> Tuner:
        return Scripted(self._turns)


class RestlessJob(TunedJob):
    def __init__(self, *, wrapped: bool, **fields: Any) -> None:
        super().__init__(wrapped=wrapped, **fields)
        self.tuners: list[Restless] = []

    def new_tuner(self, config: Config) -> Tuner:
        self.tuners.append(Restless())
        return self.tuners[-1]

    def close(self) -> None:
        super().close()
        self.stats["settings"] = sum(len(set(tuner.settings)) for tuner in self.tuners)


def replace_tuner(
    made: Callable[[Config], object], *, checked: Callable[[Config], object] = find_tuner
) -> None:
    """Who is asked for a tuner when a session begins, and when its optimizer is wrapped."""
    vars(plugins)["find_tuner"] = checked
    vars(tuned)["find_tuner"] = made
