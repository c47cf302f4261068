"""When messages of the first phase will be put in, and how much room there is between them."""

from __future__ import annotations

from itertools import islice
from typing import Final

__all__ = ["Forecast"]

#: by how much a message of the second phase may delay the end of the first
_TOLERANCE_S: Final = 0.001
#: a round that is later than this, or than this share of the last one, is another one
_GRACE_S: Final = 0.02
_GRACE: Final = 0.1
#: smaller messages say nothing of the link: they end when they are in a socket's memory
_LARGE_BYTES: Final = 1 << 17


class Forecast:
    """What one rank sends to another in the first phase of a round, foretold from the last round.

    Messages of the second phase use the link while backward computes, but none can be overtaken
    once it is under way. So one may begin only if those of the first phase, each put in when it
    was in the last round, end no later with it than without. Times are seconds of one clock.
    """

    def __init__(self) -> None:
        #: since the round began, and bytes: of the last round, and of this one so far
        self._last: list[tuple[float, int]] = []
        self._now: list[tuple[float, int]] = []
        self._began_s = 0.0
        self._sent_bytes = self._busy_s = 0.0
        self._ended_s = 0.0

    def begin_round(self, now_s: float) -> None:
        """A round begins."""
        self._last, self._now = self._now, []
        self._began_s = now_s

    def put(self, now_s: float, nbytes: int) -> None:
        """A message of the first phase may be sent."""
        self._now.append((now_s - self._began_s, nbytes))

    def sent(self, began_s: float, ended_s: float, nbytes: int) -> None:
        """A message has left; they leave in the order in which they began."""
        if nbytes >= _LARGE_BYTES:
            # Of two under way, the second has the link when the first has left.
            self._busy_s += ended_s - max(began_s, self._ended_s)
            self._sent_bytes += nbytes
        self._ended_s = ended_s

    @property
    def is_over(self) -> bool:
        """Whether no more messages of the first phase are foretold in this round."""
        return len(self._now) >= len(self._last)

    def has_room(self, now_s: float, nbytes: int) -> bool:
        """Whether a message of the second phase may begin while none of the first waits."""
        if self.is_over or not self._sent_bytes:
            return True
        age_s = now_s - self._began_s
        due_s = self._last[len(self._now)][0]
        if age_s > due_s + max(_GRACE_S, _GRACE * self._last[-1][0]):
            return True
        rate = self._sent_bytes / self._busy_s
        without_s, with_s = age_s, age_s + nbytes / rate
        for put_s, size in islice(self._last, len(self._now), None):
            without_s = max(without_s, put_s) + size / rate
            with_s = max(with_s, put_s) + size / rate
        return with_s - without_s <= _TOLERANCE_S

    def __repr__(self) -> str:
        rate = self._sent_bytes / self._busy_s if self._busy_s else 0.0
        return f"<Forecast {len(self._now)} of {len(self._last)} put in, {rate / 1e6:.1f} MB/s>"
