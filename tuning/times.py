"""What step times show: of a setting, of several that take turns, and of a cluster as it changes.

What a straggler, a checkpoint or an evaluation adds is not the setting's, nor is what a short batch
saves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from bytesched.tunable import Setting

#: a step that takes so many times one of the faster ones has done something else as well, and one
#: that much faster has done less
_OUTLIER = 1.25
#: those are up to this share of all steps: of a few, most may be outliers
_FASTER = 0.25
#: of so many steps, a single fast one is not believed
_ENOUGH = 3


def typical_s(durations_s: Sequence[float]) -> float:
    """The median of the steps that are no outliers; NaN if there are none."""
    kept = _kept(durations_s)
    return median(kept) if kept else math.nan


def spread(durations_s: Sequence[float]) -> float:
    """Median deviation of the steps that are no outliers, as a share of the typical step."""
    kept = _kept(durations_s)
    if not kept:
        return 0.0
    middle_s = median(kept)
    return median(abs(duration_s - middle_s) for duration_s in kept) / middle_s


def _kept(durations_s: Sequence[float]) -> list[float]:
    measured = sorted(duration_s for duration_s in durations_s if 0 < duration_s < math.inf)
    if not measured:
        return []
    faster = int(_FASTER * (len(measured) - 1))
    if len(measured) >= _ENOUGH:
        faster = max(faster, 1)
    usual_s = measured[faster]
    return [each_s for each_s in measured if usual_s / _OUTLIER <= each_s <= _OUTLIER * usual_s]


# -- the last comparison ---------------------------------------------------------------

#: finalists that are so close are equal, and the earlier one is taken
_TIE = 0.005
#: what is chosen may be so much slower than the best of a round
_PROMISE = 0.01
#: so much slower in every round: not worth another one
_HOPELESS = 1.05
_ROUNDS_TO_JUDGE = 2


class Guard:
    """Rounds of step times of finalists, which come in order of preference.

    A search keeps the luckiest of many measurements, taken while the cluster drifted. So nothing of
    it counts here: the finalists take turns, and are compared within each round.
    """

    def __init__(self, finalists: Sequence[Setting]) -> None:
        self._finalists = list(dict.fromkeys(finalists))
        self._rounds: list[dict[Setting, float]] = []

    def __len__(self) -> int:
        """The number of rounds."""
        return len(self._rounds)

    def turns(self) -> list[Setting]:
        """Who runs in the next round, in this order; backwards in every other one."""
        left = [setting for setting in self._finalists if not self._is_hopeless(setting)]
        return left[::-1] if len(self) % 2 else left

    def add(self, steps_s: Mapping[Setting, float]) -> None:
        """A round is over; a setting that could not be measured is NaN and does not count."""
        measured = {s: step_s for s, step_s in steps_s.items() if 0 < step_s < math.inf}
        if measured:
            self._rounds.append(measured)

    def ratios(self) -> dict[Setting, float]:
        """By setting, the median over its rounds of its time over the best of that round."""
        found = {}
        for setting in self._finalists:
            times = self._times(setting)
            if times:
                found[setting] = median(times)
        return found

    def step_s(self, setting: Setting) -> float:
        """What a step took under `setting`; NaN if it was never measured."""
        times = [one[setting] for one in self._rounds if setting in one]
        return median(times) if times else math.nan

    def chosen(self) -> Setting:
        """The best; of equals, the one to be preferred. The first if nothing was measured."""
        ratios = self.ratios()
        if not ratios:
            return self._finalists[0]
        # What fell out after a round or two is not known as well as the others.
        left = [setting for setting in self.turns() if setting in ratios] or list(ratios)
        least = min(ratios[setting] for setting in left)
        return next(s for s in self._finalists if s in left and ratios[s] <= (1 + _TIE) * least)

    def is_certain(self) -> bool:
        """Whether the chosen one kept the promise in all rounds but, of many, one."""
        times = self._times(self.chosen())
        broken = sum(ratio > 1 + _PROMISE for ratio in times)
        return bool(times) and broken <= len(times) // 4

    def _times(self, setting: Setting) -> list[float]:
        return [one[setting] / min(one.values()) for one in self._rounds if setting in one]

    def _is_hopeless(self, setting: Setting) -> bool:
        times = self._times(setting)
        return len(times) >= _ROUNDS_TO_JUDGE and min(times) > _HOPELESS


# -- what has moved for good -----------------------------------------------------------

#: steps of a window, and windows in a row that must agree
WINDOW_STEPS = 20
_WINDOWS = 3
#: a window that differs by less has not moved; nor has one within so many deviations
_MOVED = 0.12
_MOVED_DEVIATIONS = 4.0
#: what was tuned in another run was tuned for another training if a step differs by so much
_OTHER = 1.5


class Drift:
    """Watches steps in windows. What it compares with is given, or the first windows.

    One window may hold a slow phase of the cluster; only several in a row that all moved, to the
    same side, are a drift.

    Args:
        step_s: a step as this run has measured it; NaN if it has not.
        remembered_s: a step as another run had it, which is only roughly the same; NaN if unknown.
    """

    def __init__(self, step_s: float = math.nan, *, remembered_s: float = math.nan) -> None:
        self._step_s = step_s
        self._remembered_s = remembered_s
        self._left_s: list[float] = []
        self._windows: deque[tuple[float, float]] = deque(maxlen=_WINDOWS)

    def observe(self, durations_s: Sequence[float]) -> str:
        """Takes these steps. What moved, in words; or nothing."""
        self._left_s.extend(durations_s)
        while len(self._left_s) >= WINDOW_STEPS:
            window, self._left_s = self._left_s[:WINDOW_STEPS], self._left_s[WINDOW_STEPS:]
            self._windows.append((typical_s(window), spread(window)))
        latest = list(self._windows)
        if len(latest) < _WINDOWS:
            return ""
        before_s, now_s = self._step_s, median(step_s for step_s, _ in latest)
        if math.isnan(before_s):
            self._step_s = now_s
            self._windows.clear()
            # With another batch size, other sizes are the best, or none.
            then_s = self._remembered_s
            other = now_s > _OTHER * then_s or now_s < then_s / _OTHER
            return _instead(now_s, then_s) + ", when it was tuned" if other else ""
        by = max(_MOVED, _MOVED_DEVIATIONS * median(deviation for _, deviation in latest))
        least_s, most_s = min(latest)[0], max(latest)[0]
        has_moved = least_s > (1 + by) * before_s or most_s < before_s / (1 + by)
        return _instead(now_s, before_s) if has_moved else ""


def _instead(now_s: float, before_s: float) -> str:
    return f"a step takes {1e3 * now_s:.4g} ms instead of {1e3 * before_s:.4g} ms"
