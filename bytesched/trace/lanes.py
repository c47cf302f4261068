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
        #: per lane, the ends of the spans now open around the newest, outermost first
        self._open: list[list[int]] = []
        #: per lane, the time up to which it is taken by spans that are closed
        self._taken_to: list[int] = []
        self._newest: deque[Placed] = deque(maxlen=REMEMBERED_SPANS)
        self._by_task: dict[int, deque[Placed]] = {}

    @property
    def lanes(self) -> int:
        """How many lanes there are so far."""
        return len(self._open)

    def begin_batch(self) -> None:
        """The spans that follow may start before those placed so far."""
        for lane, ends in enumerate(self._open):
            if ends:
                self._taken_to[lane] = ends[0]
                ends.clear()

    def place(self, start_ns: int, end_ns: int, task: int | None = None) -> int:
        """Return the lane of a span; within a batch, call by start, the longest first."""
        lane = next((i for i in range(self.lanes) if self._fits(i, start_ns, end_ns)), self.lanes)
        if lane == self.lanes:
            self._open.append([])
            self._taken_to.append(start_ns)
        self._open[lane].append(end_ns)
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

    def _fits(self, lane: int, start_ns: int, end_ns: int) -> bool:
        ends = self._open[lane]
        while ends and ends[-1] <= start_ns:
            self._taken_to[lane] = ends.pop()
        return ends[-1] >= end_ns if ends else self._taken_to[lane] <= start_ns
