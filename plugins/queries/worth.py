"""Whether split all-reduces are worth their messages: how much was late when a script asked."""

from __future__ import annotations

from typing import Final

__all__ = ["Worth"]

#: A norm waits for all late bytes where they are sent whole, for half of them where they are
#: split, which costs more messages. From this share on it begins, and below this one it ends.
_BEGINS: Final = 0.15
_ENDS: Final = 0.05
#: Rounds from which on the mean says something: until then, a split is taken to be worth it.
_JUDGED: Final = 8


class Worth:
    """The mean of what was late when the script asked about gradients.

    Args:
        is_judged: whether that decides; else every script that asks is split.
    """

    def __init__(self, *, is_judged: bool) -> None:
        self._is_judged = is_judged
        #: since the last vote
        self._was_asked = False
        #: since the mean has decided
        self._rounds = 0
        self._late = 0.0

    def note(self, late_share: float) -> None:
        """A round in which it asked: this share of all bytes had not come when it did so first."""
        self._was_asked = True
        self._rounds += 1
        self._late += late_share

    def take(self, *, is_split: bool) -> bool:
        """Whether the next rounds should be split, as this rank has seen it since the last vote."""
        was_asked, self._was_asked = self._was_asked, False
        if was_asked and not (self._is_judged and self._rounds >= _JUDGED):
            return True
        rounds, late = self._rounds, self._late
        self._rounds, self._late = 0, 0.0
        return was_asked and late >= rounds * (_ENDS if is_split else _BEGINS)

    def __repr__(self) -> str:
        return f"<Worth {self._late / max(self._rounds, 1):.0%} late in {self._rounds} rounds>"
