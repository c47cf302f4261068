"""Whether step time or bandwidth has moved for good since a setting was adopted."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from .samples import spread, typical_s

__all__ = ["Drift"]

#: steps of a window, and windows in a row that must agree
WINDOW_STEPS = 20
_WINDOWS = 3
#: a window that differs by less has not moved; nor has one within so many deviations
_MOVED = 0.12
_DEVIATIONS = 4.0
#: what was tuned in another run was tuned for another training if a step differs by so much
_OTHER = 1.5
#: bandwidth is measured from few bytes at times
_BANDWIDTH_MOVED = 0.3


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
        self._bytes_per_s: float | None = None
        self._left_s: list[float] = []
        self._windows: deque[tuple[float, float]] = deque(maxlen=_WINDOWS)
        self._rates: deque[float] = deque(maxlen=_WINDOWS)

    def observe(self, durations_s: Sequence[float], bytes_per_s: float = math.nan) -> str:
        """Takes these steps, and what the link did meanwhile. What moved, in words; or nothing."""
        self._left_s.extend(durations_s)
        while len(self._left_s) >= WINDOW_STEPS:
            window, self._left_s = self._left_s[:WINDOW_STEPS], self._left_s[WINDOW_STEPS:]
            self._windows.append((typical_s(window), spread(window)))
        if 0 < bytes_per_s < math.inf:
            self._rates.append(bytes_per_s)
        return self._step_time() or self._bandwidth()

    def _step_time(self) -> str:
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
        by = max(_MOVED, _DEVIATIONS * median(deviation for _, deviation in latest))
        has_moved = _have_moved([step_s for step_s, _ in latest], before_s, by)
        return _instead(now_s, before_s) if has_moved else ""

    def _bandwidth(self) -> str:
        latest = list(self._rates)
        if len(latest) < _WINDOWS:
            return ""
        if self._bytes_per_s is None:
            self._bytes_per_s = median(latest)
            self._rates.clear()
            return ""
        before = self._bytes_per_s
        if not _have_moved(latest, before, _BANDWIDTH_MOVED):
            return ""
        return f"the link carries {median(latest) / 1e6:.4g} MB/s instead of {before / 1e6:.4g}"


def _have_moved(latest: Sequence[float], before: float, by: float) -> bool:
    """Whether all of them have, by such a share and to the same side."""
    return min(latest) > (1 + by) * before or max(latest) < before / (1 + by)


def _instead(now_s: float, before_s: float) -> str:
    return f"a step takes {1e3 * now_s:.4g} ms instead of {1e3 * before_s:.4g} ms"
