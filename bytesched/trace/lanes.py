"""Lanes: overlapping spans of one track, laid out so that a viewer can draw them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

__all__ = ["REMEMBERED_TASKS", "Placed", "Track"]

#: How far back a flow looks for the span it belongs to: spans of its task, spans of the track,
#: tasks known.
REMEMBERED_PER_TASK = 4
REMEMBERED_SPANS = 64
REMEMBERED_TASKS = 8192


class Placed(NamedTuple):
    """A span and the lane it is drawn in."""

    start_ns: int
    end_ns: int
    lane: int


class Track:
    """The lanes of one track.

    A viewer draws the slices of one thread as a stack, so within a lane two spans are either
    apart or one inside the other. A span takes the first lane where that holds.
    """

    def __init__(self) -> None:
        #: per lane, the time up to which closed spans take it, and the ends of those now open
        #: around the newest, outermost first
        self._lanes: list[list[int]] = []
        self._newest: deque[Placed] = deque(maxlen=REMEMBERED_SPANS)
        self._by_task: dict[int, deque[Placed]] = {}

    def begin_batch(self) -> None:
        """The spans that follow may start before those placed so far."""
        for ends in self._lanes:
            ends[:] = ends[1:2] or ends

    def place(self, start_ns: int, end_ns: int, task: int | None = None) -> int:
        """Return the lane of a span; within a batch, call by start, the longest first."""
        lane = next(
            (i for i, ends in enumerate(self._lanes) if _fits(ends, start_ns, end_ns)),
            len(self._lanes),
        )
        if lane == len(self._lanes):
            self._lanes.append([start_ns])
        self._lanes[lane].append(end_ns)
        placed = Placed(start_ns, end_ns, lane)
        self._newest.append(placed)
        if task is not None:
            if len(self._by_task) > REMEMBERED_TASKS:
                self._by_task.clear()
            self._by_task.setdefault(task, deque(maxlen=REMEMBERED_PER_TASK)).append(placed)
        return lane

    def find(self, at_ns: int, task: int) -> Placed | None:
        """Return the span that covers a moment: the task's own, else the last one placed."""
        for placed in (*reversed(self._by_task.get(task, ())), *reversed(self._newest)):
            if placed.start_ns <= at_ns <= placed.end_ns:
                return placed
        return None


def _fits(ends: list[int], start_ns: int, end_ns: int) -> bool:
    """Whether a span is apart from those of a lane, or inside the innermost that is open."""
    while len(ends) > 1 and ends[-1] <= start_ns:
        ends[0] = ends.pop()
    return ends[-1] >= end_ns if len(ends) > 1 else ends[0] <= start_ns
