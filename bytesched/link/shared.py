"""Virtual time, and a link in it that transfers share: each gets as much as the others."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial

__all__ = ["ManualClock", "SharedLink"]

#: seconds of a transfer that are no more than rounding
_NOTHING_S = 1e-12


class ManualClock:
    """Time that moves only when told, and calls what falls due on the way."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._sequence = 0

    def call_at(self, at_s: float, callback: Callable[[], object]) -> None:
        """Calls ``callback`` at ``at_s``, or next if that is over; ties in order of the calls."""
        heapq.heappush(self._due, (at_s, self._sequence, callback))
        self._sequence += 1

    def run(self) -> None:
        """Moves time on until nothing is due any more."""
        while self._due:
            at_s, _, callback = heapq.heappop(self._due)
            self.now_s = max(self.now_s, at_s)
            callback()


class SharedLink:
    """Carries transfers at once, as connections of one network do: n of them take n times as long.

    A transfer has as many seconds as it would take alone.
    """

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._left_s: list[tuple[float, Callable[[], object]]] = []
        self._since_s = 0.0
        #: of the plan that is in force: those before it are void
        self._plan = 0

    def start(self, alone_s: float, done: Callable[[], object]) -> None:
        """Begins a transfer; ``done`` is called when it is over."""
        self._serve()
        self._left_s.append((alone_s, done))
        self._plan_next()

    def _serve(self) -> None:
        """What was carried since the last event is carried no more."""
        now_s = self._clock.now_s
        if self._left_s:
            served_s = (now_s - self._since_s) / len(self._left_s)
            self._left_s = [(left_s - served_s, done) for left_s, done in self._left_s]
        self._since_s = now_s

    def _plan_next(self) -> None:
        self._plan += 1
        if self._left_s:
            least_s = max(0.0, min(left_s for left_s, _ in self._left_s))
            at_s = self._clock.now_s + least_s * len(self._left_s)
            self._clock.call_at(at_s, partial(self._due, self._plan))

    def _due(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._serve()
        # The one that this was planned for is over, however times were rounded.
        least_s = max(_NOTHING_S, min(left_s for left_s, _ in self._left_s))
        over = [done for left_s, done in self._left_s if left_s <= least_s]
        self._left_s = [(left_s, done) for left_s, done in self._left_s if left_s > least_s]
        self._plan_next()
        for done in over:
            done()
