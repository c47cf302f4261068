"""Virtual time, and a link in it that transfers share: each gets as much as the others."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf

__all__ = ["SharedLink"]

#: seconds of a transfer that are no more than rounding
_NOTHING_S = 1e-12


class SharedLink:
    """Carries transfers at once, as connections of one network do: n of them take n times as long.

    A transfer has as many seconds as it would take alone. Time moves in `run` alone.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._number = 0
        self._left_s: list[tuple[float, Callable[[], object]]] = []

    def after(self, duration_s: float, then: Callable[[], object]) -> None:
        """Calls ``then`` so much later; at one moment, in the order of these calls."""
        heapq.heappush(self._due, (self.now_s + duration_s, self._number, then))
        self._number += 1

    def start(self, alone_s: float, done: Callable[[], object]) -> None:
        """Begins a transfer; ``done`` is called when it is over."""
        self._left_s.append((alone_s, done))

    def run(self) -> None:
        """Moves time on until nothing is due or under way any more."""
        while self._due or self._left_s:
            least_s = max(_NOTHING_S, min((left_s for left_s, _ in self._left_s), default=0.0))
            end_s = self.now_s + least_s * len(self._left_s) if self._left_s else inf
            is_end = not self._due or end_s < self._due[0][0]
            at_s = end_s if is_end else self._due[0][0]
            passed_s = (at_s - self.now_s) / max(1, len(self._left_s))
            self.now_s = at_s
            # What this was planned for is over, however times were rounded.
            called = [done for left_s, done in self._left_s if is_end and left_s <= least_s]
            self._left_s = [
                (left_s - passed_s, done)
                for left_s, done in self._left_s
                if not (is_end and left_s <= least_s)
            ]
            if not is_end:
                called.append(heapq.heappop(self._due)[2])
            for call in called:
                call()
