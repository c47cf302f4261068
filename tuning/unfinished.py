"""What a tuning that did not come to its end has found: for the user, and for the next run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from bytesched.tunable import Setting

from .file import TuningFile

__all__ = ["Unfinished", "best_so_far"]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What earlier runs have measured: times over those of the untuned steps of the same run."""

    #: what they took
    steps: int
    #: of the search, by setting
    ratios: dict[Setting, float]
    #: of the comparison at the end, by setting for each round, also of one that was cut off
    rounds: tuple[dict[Setting, float], ...]

    @classmethod
    def of(cls, tuning: TuningFile) -> Unfinished:
        """What `tuning` holds. Runs are told apart by their untuned steps, with which each begins.

        What stands for a setting is the median over the runs that have tried it.
        """
        found: dict[Setting, list[float]] = {}
        rounds: list[dict[Setting, float]] = [{}]
        untuned_ms = math.nan
        for trial in tuning.trials:
            ratio = trial.step_ms / untuned_ms
            if trial.phase == "baseline":
                untuned_ms = trial.step_ms or math.nan
                rounds.append({})
            elif not ratio > 0:
                continue
            elif trial.phase == "search":
                found.setdefault(trial.setting, []).append(ratio)
            elif trial.phase == "guard":
                if trial.setting in rounds[-1]:
                    rounds.append({})
                rounds[-1][trial.setting] = ratio
        ratios = {setting: median(of_setting) for setting, of_setting in found.items()}
        return cls(tuning.steps, ratios, tuple(one for one in rounds if one))


def best_so_far(tuning: TuningFile) -> tuple[Setting, float] | None:
    """The fastest setting that was tried and its gain in percent; None if none gained anything."""
    ratios = Unfinished.of(tuning).ratios
    best = min(ratios, key=lambda setting: ratios[setting], default=None)
    if best is None or ratios[best] >= 1:
        return None
    return best, 100 * (1 - ratios[best])
