"""For how long something was under way."""

from __future__ import annotations

from time import perf_counter_ns

__all__ = ["Busy"]


class Busy:
    """Adds up the time in which at least one thing was under way.

    Beginnings and ends come from one thread at a time; the total may be read on any thread.
    """

    def __init__(self) -> None:
        self._under_way = 0
        #: the time up to the last end, and when what is under way began, or 0: read as one
        self._state = (0, 0)

    def begins(self, now_ns: int) -> None:
        """One more thing is under way."""
        if not self._under_way:
            self._state = (self._state[0], now_ns)
        self._under_way += 1

    def ends(self, now_ns: int) -> None:
        """One of them is over."""
        self._under_way -= 1
        if not self._under_way:
            total_ns, since_ns = self._state
            self._state = (total_ns + now_ns - since_ns, 0)

    @property
    def total_ns(self) -> int:
        """The time so far, with that of what is under way."""
        total_ns, since_ns = self._state
        return total_ns + (perf_counter_ns() - since_ns if since_ns else 0)

    def __repr__(self) -> str:
        return f"<Busy {self.total_ns / 1e6:.1f} ms, {self._under_way} under way>"
