"""Whether gradients go in two halves: where all ranks ask about them on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from .buckets import Bucket, Member
from .wire import Wire

#: the round of the first vote, when the ranks know how long all of it takes; then 8, 16, …
_FIRST: Final = 4
#: rounds from which on they vote at equal distances
_EVERY: Final = 256
#: A norm waits for all late bytes where they are sent whole, for half of them in two halves, which
#: cost more messages: so much of all bytes has to be late, on average of so many rounds.
_LATE: Final = 0.15
_JUDGED: Final = 8
#: From this share of all bytes on, a script has asked about its gradients, and not about some.
_MOST: Final = 0.5


class Splitting:
    """The ranks' vote on it, beside some rounds; all of them act on it before the same round.

    Args:
        mode: "auto", "on" from the first planned round on, or "off".
    """

    def __init__(self, wire: Wire, mode: str) -> None:
        self._wire = wire
        self._mode = mode
        self._rounds = 0
        #: rounds in which the script has asked, whether it has since the last vote, and the sum of
        #: the shares of those rounds that were late
        self._asking, self._was_asked, self._late = 0, False, 0.0
        #: whose gradients the script has asked about in this round, and how much was late then
        self._asked: dict[Bucket, None] = {}
        self._late_bytes = 0
        self._vote: torch.Tensor | None = None
        self._voting: Any = None
        self._is_wanted = mode == "on"

    def ask(self, members: Iterable[Member], late_bytes: Callable[[], int]) -> None:
        """The script asks about these.

        Args:
            late_bytes: how much of the round has not come.
        """
        if self._mode != "auto":
            return
        if not self._asked:
            self._late_bytes = late_bytes()
        self._asked |= dict.fromkeys(member.bucket for member in members)

    def round_begins(self, buckets: Iterable[Bucket]) -> bool:
        """Whether the round that begins is the first one in two halves.

        Args:
            buckets: of the round before.
        """
        if self._is_wanted:
            self._mode, self._is_wanted = "off", False
            return True
        if self._asked:
            asked_bytes = sum(bucket.buffer.nbytes for bucket in self._asked)
            nbytes = sum(bucket.buffer.nbytes for bucket in buckets)
            if asked_bytes and asked_bytes >= _MOST * nbytes:
                self._asking, self._was_asked = self._asking + 1, True
                self._late += self._late_bytes / nbytes
            self._asked.clear()
        return False

    def round_ends(self) -> None:
        """All of its chunks have been issued: a vote goes behind them."""
        self._rounds += 1
        if self._mode != "auto" or not _is_due(self._rounds):
            return
        wants, self._was_asked = self._was_asked, False
        if self._asking >= _JUDGED:
            wants = wants and self._late >= _LATE * self._asking
            self._asking, self._late = 0, 0.0
        self._vote = torch.tensor([0.0 if wants else 1.0], dtype=torch.float64, device="cpu")
        self._voting = self._wire.start_largest(self._vote)

    def landed(self) -> None:
        """Nothing else is under way. Raises `TransportError`."""
        if self._vote is not None:
            self._wire.wait(self._voting, "a vote on halves")
            self._is_wanted = not float(self._vote)
            self._vote = self._voting = None

    def forget(self) -> None:
        """Lets go of a vote that is under way, and of buckets."""
        self._vote = self._voting = None
        self._asked.clear()

    def __repr__(self) -> str:
        return f"<Splitting {self._mode!r}, {self._rounds} rounds>"


def _is_due(rounds: int) -> bool:
    """Whether there is a vote in this round, from 1 on."""
    if rounds < _EVERY:
        return rounds >= _FIRST and rounds & (rounds - 1) == 0
    return rounds % _EVERY == 0
