"""Where all workers come to do the same thing, at a server."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

from bytesched.errors import PeerLost

__all__ = ["Meetings", "listed"]


class Meetings:
    """Which workers have come to which meeting, and with which call.

    Args:
        workers: how many have to come.
        left: workers that will never come again; the server adds to it.
    """

    def __init__(self, workers: int, left: set[int]) -> None:
        self._workers = workers
        self._left = left
        #: by number of the meeting, what each worker calls
        self._here: dict[int, dict[int, str]] = {}
        self._since_s: dict[int, float] = {}

    def come(self, number: int, worker: int, what: str) -> str | None:
        """``worker`` is there; None until all are, and then what differs, if anything does.

        PeerLost if one has left.
        """
        here = self._here.setdefault(number, {})
        self._since_s.setdefault(number, monotonic())
        here[worker] = what
        self.check()
        if len(here) < self._workers:
            return None
        del self._here[number], self._since_s[number]
        different = next((w for w in sorted(here) if here[w] != here[0]), None)
        if different is None:
            return ""
        return f"worker 0 called {here[0]}, and worker {different} called {here[different]}"

    def check(self) -> None:
        """Raises PeerLost if a meeting waits for one of them."""
        for here in self._here.values():
            if absent := self._left - here.keys():
                what = next(iter(here.values()))
                raise PeerLost(f"worker {listed(absent)} left; others are at: {what}")

    def overdue(self, oldest_s: float) -> str:
        """Which workers are missing if others wait since before ``oldest_s``; else empty."""
        for number, since_s in self._since_s.items():
            if since_s < oldest_s:
                here = self._here[number]
                absent = [worker for worker in range(self._workers) if worker not in here]
                return f"worker {listed(absent)} at: {next(iter(here.values()))}"
        return ""


def listed(workers: Iterable[int]) -> str:
    """Their numbers, for a message."""
    return ", ".join(map(str, sorted(workers)))
