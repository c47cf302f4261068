"""The last comparison: what was found against the untuned setting and against no scheduling.

A search keeps the luckiest of many measurements, taken while the cluster drifted. So nothing of it
counts here: the finalists take turns, and are compared within each round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from bytesched.tunable import Setting

__all__ = ["Guard"]

#: finalists that are so close are equal, and the earlier one is taken
_TIE = 0.005
#: what is chosen may be so much slower than the best of a round
_PROMISE = 0.01
#: so much slower in every round: not worth another one
_HOPELESS = 1.05
_ROUNDS_TO_JUDGE = 2


class Guard:
    """Rounds of step times of finalists, which come in order of preference."""

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
