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
    """The mean, since the last vote, of what was late when the script asked about gradients."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._rounds = 0
        self._late = 0.0

    def note(self, late_share: float) -> None:
        """A round in which it asked: this share of all bytes had not come when it did so first."""
        self._rounds += 1
        self._late += late_share

    def take(self, *, is_split: bool) -> bool:
        """Whether the next rounds should be split, as this rank has seen it; begins anew."""
        rounds, late = self._rounds, self._late
        self._clear()
        return rounds > 0 and (
            rounds < _JUDGED or late / rounds >= (_ENDS if is_split else _BEGINS)
        )

    def __repr__(self) -> str:
        return f"<Worth {self._late / max(self._rounds, 1):.0%} late in {self._rounds} rounds>"
