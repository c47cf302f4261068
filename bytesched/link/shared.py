"""Virtual time, what happens in it, and a link that transfers share: each as much as the others."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import TypeAlias

__all__ = ["Event", "Process", "SharedLink"]

#: seconds of a transfer that are no more than rounding
_NOTHING_S = 1e-12


class Event:
    """Happens once."""

    def __init__(self) -> None:
        self.has_happened = False
        self._calls: list[Callable[[], object]] = []

    def happen(self) -> None:
        """Whoever has waited goes on."""
        self.has_happened = True
        for call in self._calls:
            call()

    def then(self, call: Callable[[], object]) -> None:
        """Calls it as soon as this happens, which it has not yet."""
        self._calls.append(call)


#: what goes on in time: it yields so many seconds, or what it waits for
Process: TypeAlias = Iterator[float | Event]


class SharedLink:
    """Carries transfers at once, as connections of one network do: n of them take n times as long.

    Time moves in `run` alone.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._number = 0
        self._left_s: list[tuple[float, Event]] = []

    def carry(self, alone_s: float) -> Event:
        """The end of a transfer that begins now, and takes so many seconds alone."""
        self._left_s.append((alone_s, Event()))
        return self._left_s[-1][1]

    def go_on(self, process: Process) -> None:
        """``process`` does what it does next; at one moment, in the order of these calls."""
        later: Callable[[], object] = partial(self.go_on, process)
        for waits_for in process:
            if not isinstance(waits_for, Event):
                heapq.heappush(self._due, (self.now_s + waits_for, self._number, later))
                self._number += 1
                return
            if not waits_for.has_happened:
                waits_for.then(later)
                return

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
            over = [end for left_s, end in self._left_s if is_end and left_s <= least_s]
            self._left_s = [
                (left_s - passed_s, end) for left_s, end in self._left_s if end not in over
            ]
            for end in over:
                end.happen()
            if not is_end:
                heapq.heappop(self._due)[2]()
