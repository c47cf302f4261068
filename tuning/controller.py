"""The tuning of one run as a pure state machine: a turn to run comes out, its step times go in.

::

    baseline ─► search ─► guard ─► watch ─┐
       ▲                                  │ drift, at most so often
       └──────────────────────────────────┘

It holds no thread and does no I/O; its clock is given. Whoever drives it runs each `Turn` on all
ranks and answers with the durations of its steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bytesched.tunable import Setting

from .file import Trial
from .search import Search
from .times import Drift, Guard, spread, typical_s


@dataclass(frozen=True, slots=True)
class Turn:
    """Run so many steps under a setting; the first of them do not count."""

    setting: Setting
    steps: int
    dropped: int
    #: "baseline", "search", "guard" or "watch"
    phase: str


@dataclass(frozen=True, slots=True)
class Pace:
    """How many steps things take."""

    #: of one tuning, from the first turn until something is adopted; never exceeded
    budget: int = 150
    #: dropped after the model was wrapped, and after a change of sizes
    first_drop: int = 2
    drop: int = 1
    #: seconds from one tuning that drift asked for to the next
    retune_every_s: float = 900.0


#: steps dropped where the sizes of the turn before stay, and after scheduling went off or on
SAME_DROP, _OFF_DROP = 1, 2
#: samples of the untuned setting, of a candidate, and more of one that is not clearly worse
_BASELINE, _LEAST, _MORE = 6, 2, 3
#: samples of each finalist in a round of the guard, and how many rounds
_SAMPLES, _LEAST_ROUNDS, _MOST_ROUNDS = 3, 3, 6
#: steps between two looks at the drift
_WATCH = 100


@dataclass(frozen=True, slots=True)
class Adopted:
    """The tuning is over."""

    setting: Setting
    #: by finalist, what a step took when they ran in turns
    steps_s: dict[Setting, float]
    #: what the tuning took
    steps: int


@dataclass(frozen=True, slots=True)
class Drifted:
    """What was adopted may no longer be the best."""

    what: str
    #: whether the tuning begins again; not if it did so shortly before
    retunes: bool


Report = Trial | Adopted | Drifted
_T = TypeVar("_T")
_Running = Generator[Turn, tuple[float, ...], _T]

#: a candidate whose best step is so much slower than the best setting's typical one is cut, or by
#: so many times the deviation of the baseline's steps
_CUT = 0.05
_DEVIATIONS = 2.0
#: guard and search disagree so much on several settings: the cluster changed in between
_CHANGED = 1.15
#: so many trials in a row that gain less than that end the search
_GAIN = 0.005
_FRUITLESS = 8
#: the share of a small budget that is kept for the guard
_GUARDED = 0.45


class Controller:
    """Finds, guards and watches a setting.

    Args:
        untuned: what would hold without it; the baseline.
        can_switch_off: whether scheduling can be off for a turn.
        search: makes the search once the baseline is measured; told what is adopted by then.
        now_s: reads the time.
        pace: how many steps to spend.
        report: told what happens.
        known: a setting that is adopted from the start.
        known_step_s: what a step took under it when it was tuned; NaN if that is not known.
    """

    def __init__(
        self,
        untuned: Setting,
        *,
        can_switch_off: bool,
        search: Callable[[Setting | None], Search],
        now_s: Callable[[], float],
        pace: Pace | None = None,
        report: Callable[[Report], None] = lambda _: None,
        known: Setting | None = None,
        known_step_s: float = math.nan,
    ) -> None:
        self._untuned = untuned
        self._off: Setting | None = None
        if can_switch_off:
            sizes = untuned.partition_bytes, untuned.credit_bytes
            self._off = Setting(*sizes, untuned.policy, enabled=False)
        self._search = search
        self._now_s = now_s
        self.pace = pace or Pace()
        self._report = report
        self.adopted = known
        self._known_step_s = known_step_s
        #: under what was adopted, as this run has measured it
        self._step_s = math.nan
        self._noise = 0.0
        self._retuned_s = -math.inf
        #: steps of the tuning under way, or of the last one
        self.steps = 0
        #: of the turn before this one
        self._before: Setting | None = None
        self._life = self._live()
        #: what to run now
        self.turn = next(self._life)

    def observe(self, durations_s: Sequence[float]) -> Turn:
        """The turn was run. The next turn."""
        self.steps += len(durations_s)
        before = self.turn.setting
        self.turn = self._life.send(tuple(durations_s[self.turn.dropped :]))
        assert self.turn.steps > self.turn.dropped, (before, self.turn)
        return self.turn

    @property
    def more_trials(self) -> int:
        """About how many candidates there is time for."""
        enough = _LEAST_ROUNDS * self._round_steps(self._finalists)
        guard = max(self._round_steps(1), min(enough, int(_GUARDED * self.pace.budget)))
        left = self.pace.budget - guard - self.steps
        return max(0, left // (self.pace.drop + _LEAST + SAME_DROP + _MORE))

    # -- phases ------------------------------------------------------------------------

    def _live(self) -> _Running[None]:
        if self.adopted is None:
            yield from self._tune()
        while True:
            yield from self._watch()
            yield from self._tune()

    def _tune(self) -> _Running[None]:
        changed = yield from self._search_and_guard()
        if changed and self._may_retune("the cluster changed during the search"):
            yield from self._search_and_guard()

    def _search_and_guard(self) -> _Running[bool]:
        """Adopts a setting; whether the cluster seems to have changed meanwhile."""
        self.steps = 0
        baseline_s = yield from self._measure(self._untuned, _BASELINE, "baseline")
        self._noise = spread(self._samples_s)
        search = self._search(self.adopted)
        costs = {self._untuned: baseline_s}
        if baseline_s > 0:
            search.tell(self._untuned, baseline_s)
        self._report(_trial(self._untuned, "baseline", self._samples_s))
        yield from self._search_with(search, costs)
        changed = yield from self._guard(costs)
        return changed

    def _search_with(self, search: Search, costs: dict[Setting, float]) -> _Running[None]:
        fruitless = 0
        while self.more_trials and fruitless < _FRUITLESS:
            setting = search.ask()
            if setting is None:
                break
            best_s = min(costs.values())
            step_s = yield from self._try(setting, best_s)
            if not step_s > 0:
                break
            costs[setting] = step_s
            search.tell(setting, step_s)
            fruitless = 0 if step_s < (1 - _GAIN) * best_s else fruitless + 1

    def _try(self, setting: Setting, best_s: float) -> _Running[float]:
        """One candidate; more steps are only spent on it if it may be among the best."""
        step_s = yield from self._measure(setting, _LEAST, "search")
        samples_s = self._samples_s
        # Where steps differ by themselves, a few late ones show less.
        worse = 1 + max(_CUT, _DEVIATIONS * self._noise)
        cut = min(samples_s, default=math.inf) > worse * best_s
        if not cut:
            yield from self._measure(setting, _MORE, "search")
            samples_s += self._samples_s
            step_s = typical_s(samples_s)
        self._report(_trial(setting, "search", samples_s, cut=cut))
        return step_s

    def _guard(self, costs: dict[Setting, float]) -> _Running[bool]:
        """Adopts the best of the finalists."""
        tried = sorted((s for s in costs if s != self._untuned), key=lambda s: costs[s])
        others = [self._off] if self._off is not None else []
        guard = Guard([self._untuned, *tried[: self._finalists], *others])
        while len(guard) < _MOST_ROUNDS:
            turns = guard.turns()
            if len(turns) < 2 or self.steps + self._steps_of(turns) > self.pace.budget:
                break
            if len(guard) >= _LEAST_ROUNDS and guard.is_certain():
                break
            steps_s = {}
            for setting in turns:
                steps_s[setting] = yield from self._measure(setting, _SAMPLES, "guard")
                self._report(_trial(setting, "guard", self._samples_s))
            guard.add(steps_s)
        self.adopted = guard.chosen()
        self._step_s = guard.step_s(self.adopted)
        steps_s = {setting: guard.step_s(setting) for setting in guard.ratios()}
        self._report(Adopted(self.adopted, steps_s, self.steps))
        moved = [guard.step_s(s) / costs[s] for s in costs if guard.step_s(s) > 0 and costs[s] > 0]
        return len(moved) > 1 and (min(moved) > _CHANGED or max(moved) < 1 / _CHANGED)

    def _watch(self) -> _Running[None]:
        """Ends with a drift that a tuning may answer."""
        assert self.adopted is not None
        drift = Drift(self._step_s, remembered_s=self._known_step_s)
        told = False
        while True:
            yield from self._measure(self.adopted, _WATCH, "watch")
            what = drift.observe(self._samples_s)
            if what and self._may_retune(what, quietly=told):
                return
            told = told or bool(what)

    def _may_retune(self, what: str, *, quietly: bool = False) -> bool:
        retunes = self._now_s() - self._retuned_s >= self.pace.retune_every_s
        if retunes:
            self._retuned_s = self._now_s()
        if retunes or not quietly:
            self._report(Drifted(what, retunes))
        return retunes

    # -- turns -------------------------------------------------------------------------

    def _measure(self, setting: Setting, samples: int, phase: str) -> _Running[float]:
        """Runs a turn; its typical step."""
        dropped = self._dropped(self._before, setting)
        self._before = setting
        self._samples_s = yield Turn(setting, dropped + samples, dropped, phase)
        return typical_s(self._samples_s)

    def _steps_of(self, turns: Sequence[Setting]) -> int:
        """What a round of the guard takes, if it begins now."""
        steps, before = 0, self._before
        for setting in turns:
            steps += self._dropped(before, setting) + _SAMPLES
            before = setting
        return steps

    def _dropped(self, before: Setting | None, setting: Setting) -> int:
        """Steps of a turn under `setting` that do not count, after one under `before`."""
        if before is None:
            return self.pace.first_drop
        if before == setting:
            return SAME_DROP
        return self.pace.drop if setting.enabled is before.enabled else self._off_drop

    @property
    def _off_drop(self) -> int:
        return max(self.pace.drop, _OFF_DROP)

    @property
    def _finalists(self) -> int:
        """How many candidates the guard takes."""
        enough = 2 * _LEAST_ROUNDS * self._round_steps(2)
        return 2 if self.pace.budget >= enough else 1

    def _round_steps(self, candidates: int) -> int:
        drop = self.pace.drop
        steps = (1 + candidates) * (drop + _SAMPLES)
        if self._off is None:
            return steps
        # What comes after it, in this round or the next, begins with as many that do not count.
        return steps + 2 * self._off_drop + _SAMPLES - drop


def _trial(setting: Setting, phase: str, samples_s: Sequence[float], *, cut: bool = False) -> Trial:
    durations_ms = tuple(1e3 * each_s for each_s in samples_s if 0 < each_s < math.inf)
    return Trial(setting, phase, 1e3 * typical_s(samples_s), durations_ms, cut)
