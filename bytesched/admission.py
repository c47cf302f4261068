"""Admission: how much may start at once, from when gradients were released in earlier iterations.

Prophet (ICPP 2021): backward releases gradients in steps. What fits between two of them may go as
one block, in which nothing has to be decided, since nothing more urgent can come meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from bytesched.task import CommTask

__all__ = ["Foreseen"]

#: iterations from which releases are foreseen
_ROUNDS: Final = 3
#: A block is at most so many times the credit: what starts it packs it before anything else.
_MOST_CREDITS: Final = 4


class Foreseen:
    """Blocks of what the link carries until the next release, as earlier iterations had it.

    A gradient that comes sooner than in any of the last iterations waits for the block. Once all
    are released, nothing more urgent can come, and only the size of a block is limited.

    Args:
        tasks: how many are released in an iteration.
        clock: seconds, from any moment on.
    """

    def __init__(self, tasks: int, clock: Callable[[], float]) -> None:
        self._tasks = tasks
        self._clock = clock
        self._rounds: deque[dict[int, float]] = deque(maxlen=_ROUNDS)
        #: by task, in seconds after the first release of its iteration
        self._releases_s: dict[int, float] = {}
        self._began_s = 0.0
        #: releases to come, the next one last
        self._expected: list[tuple[float, int]] = []
        self._largest_bytes = 0
        self._on_way = 0
        self._busy_since_s = self._busy_s = 0.0
        self._busy_bytes = 0
        self._bytes_per_s = 0.0

    def ready(self, task: CommTask) -> None:
        """``task`` has been released; each is once in an iteration."""
        if len(self._releases_s) == self._tasks:
            self._begin()
        now_s = self._clock()
        if not self._releases_s:
            self._began_s = now_s
        self._releases_s[task.index] = now_s - self._began_s
        self._largest_bytes = max(self._largest_bytes, task.nbytes)
        while self._expected and self._expected[-1][1] in self._releases_s:
            self._expected.pop()

    def started(self, task: CommTask) -> None:
        """``task`` is on its way."""
        if not self._on_way:
            self._busy_since_s = self._clock()
        self._on_way += 1

    def finished(self, task: CommTask) -> None:
        """It has arrived."""
        self._on_way -= 1
        self._busy_bytes += task.nbytes
        if not self._on_way:
            self._busy_s += self._clock() - self._busy_since_s

    def block_bytes(self, credit_bytes: int) -> int:
        """The most bytes on their way when a block starts, where less than the credit are."""
        if len(self._rounds) < _ROUNDS:
            return credit_bytes
        most_bytes = _MOST_CREDITS * credit_bytes
        if not self._expected:
            return most_bytes
        left_s = self._began_s + self._expected[-1][0] - self._clock()
        # The last task of a block may exceed it.
        fits = left_s * self._bytes_per_s - self._largest_bytes
        return int(min(max(credit_bytes, fits), most_bytes))

    def _begin(self) -> None:
        """All tasks have been released once: the next release is that of another iteration."""
        self._rounds.append(self._releases_s)
        self._releases_s = {}
        if self._busy_s:
            self._bytes_per_s = self._busy_bytes / self._busy_s
        self._busy_s, self._busy_bytes = 0.0, 0
        if len(self._rounds) == _ROUNDS:
            # The soonest: a block that is too small costs little, one that is too large holds up
            # what is more urgent.
            soonest = ((min(r[index] for r in self._rounds), index) for index in self._rounds[0])
            self._expected = sorted(soonest, reverse=True)

    def __repr__(self) -> str:
        return (
            f"<Foreseen {len(self._releases_s)} of {self._tasks} released, "
            f"{self._bytes_per_s / 1e6:.1f} MB/s>"
        )
