"""When something was under way."""

from __future__ import annotations

__all__ = ["Spans"]


class Spans:
    """The times of operations, by number. Threads of a carrier note ends."""

    def __init__(self) -> None:
        self.began_ns: dict[int, int] = {}
        self._ended_ns: dict[int, int] = {}

    def begin(self, number: int, at_ns: int) -> None:
        """One has begun."""
        self.began_ns[number] = at_ns

    def end(self, number: int, at_ns: int) -> None:
        """One has ended."""
        self._ended_ns[number] = at_ns

    @property
    def is_complete(self) -> bool:
        """Whether the end of everything is known."""
        return bool(self.began_ns) and self._ended_ns.keys() == self.began_ns.keys()

    def busy_ns(self) -> int:
        """For how long something was under way."""
        busy_ns = last_ns = 0
        spans = sorted((at_ns, self._ended_ns[number]) for number, at_ns in self.began_ns.items())
        for began_ns, ended_ns in spans:
            busy_ns += max(0, ended_ns - max(began_ns, last_ns))
            last_ns = max(last_ns, ended_ns)
        return busy_ns

    def __repr__(self) -> str:
        return f"<Spans: {len(self._ended_ns)} of {len(self.began_ns)} have ended>"
