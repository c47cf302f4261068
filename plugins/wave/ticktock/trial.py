"""Whether waves that overlap are faster than waves one after another: measured, then decided."""

from __future__ import annotations

import logging
import statistics

log = logging.getLogger("bytesched")

#: steps of each kind before the first that counts
_WARM_UP = 2
#: steps of each kind that count
_TIMED = 5


class Trial:
    """Durations of steps in, what the next step does out. Pure.

    Both kinds take turns, so that a slow moment of the machine meets both.
    """

    def __init__(self) -> None:
        #: by whether waves overlapped
        self._durations_s: dict[bool, list[float]] = {True: [], False: []}
        #: the decision, once there is one
        self.overlap: bool | None = None

    @property
    def next_overlaps(self) -> bool:
        """Whether the waves of the next step overlap."""
        if self.overlap is not None:
            return self.overlap
        return len(self._durations_s[True]) <= len(self._durations_s[False])

    def add(self, duration_s: float) -> None:
        """The step for which ``next_overlaps`` was asked took so long."""
        self._durations_s[self.next_overlaps].append(duration_s)
        if len(self._durations_s[False]) < _WARM_UP + _TIMED:
            return
        beside_ms, after_ms = self.figures_ms()
        self.overlap = beside_ms < after_ms
        if self.overlap:
            log.info(
                "waves: a step takes %.1f ms, %.1f ms with one after another", beside_ms, after_ms
            )
        else:
            log.info(
                "waves are off, gradients are accumulated from here on: a step takes %.1f ms with "
                "waves, %.1f ms with one after another; the device is busy without them",
                beside_ms,
                after_ms,
            )

    def figures_ms(self) -> tuple[float, float]:
        """Median duration of a step, with waves that overlap and one after another; 0 if none."""
        beside, after = (
            self._durations_s[overlap][_WARM_UP:] or [0.0] for overlap in (True, False)
        )
        return 1e3 * statistics.median(beside), 1e3 * statistics.median(after)
