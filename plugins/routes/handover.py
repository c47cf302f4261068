"""Whose the gradients are: the session's, or, for a time, the framework's again."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Handover"]


class Handover:
    """Takes gradients from the framework and gives them back; without one, they have no other."""

    def __init__(self) -> None:
        #: gradients and steps are the framework's at the moment
        self.off = False
        self._take: Callable[[], Callable[[], None]] = _taken_by_none
        self._give_back: Callable[[], None] = _nothing
        self._can_stop = False

    def use(self, take: Callable[[], Callable[[], None]], *, can_stop: bool) -> None:
        """``take`` makes gradients the session's; what it returns makes them the framework's.

        With ``can_stop``, both may happen several times.
        """
        self._give_back = take()
        self._take = take
        self._can_stop = can_stop

    @property
    def knobs(self) -> frozenset[str]:
        """What can be changed beside what the backend can, of `tunable.KNOBS`."""
        return frozenset({"enabled"} if self._can_stop else ())

    def take(self) -> None:
        """Gradients are the session's again."""
        self._give_back = self._take()
        self.off = False

    def give_back(self) -> None:
        """Gradients are the framework's, as they may be already."""
        give_back, self._give_back = self._give_back, _nothing
        give_back()


def _taken_by_none() -> Callable[[], None]:
    return _nothing


def _nothing() -> None:
    pass
