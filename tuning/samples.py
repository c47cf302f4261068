"""Step times that stand for a setting: what a straggler, a checkpoint or an evaluation adds is not
the setting's, nor is what a short batch saves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

__all__ = ["spread", "typical_s"]

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
