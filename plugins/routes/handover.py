"""Whose the gradients are: the session's, or, for a time, the framework's again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import nn

from bytesched.errors import BytesschedError

from ..layout.slots import Slot

__all__ = ["Borrower", "Handover", "Hooks"]


class Borrower(Protocol):
    """What reduces gradients in place of a session for a while: the framework's own reducer."""

    def borrow(self, parameters: Sequence[nn.Parameter], bucket_bytes: int) -> None:
        """Gradients are the framework's from the next forward pass on.

        Args:
            parameters: by first use.
        """

    def give_back(self) -> None:
        """They are not any more. Idempotent."""

    def prepare(self) -> None:
        """A forward pass begins; collective after the first backward pass."""

    def missing(self) -> list[int] | None:
        """Which parameters a backward pass has left out, if it is not complete; None if it is."""

    def named(self, error: BaseException) -> BytesschedError | None:
        """``error`` of a backward pass as one of ours, if it is one of communication."""

    def lost(self) -> BytesschedError | None:
        """The error of a connection that is broken, if one is. Any thread."""


class Hooks(Protocol):
    """The session's on gradients."""

    #: rounds while only they were counted
    counted: int

    def put_on(self) -> None:
        """Every gradient takes part in its round."""

    def count(self, slot: Slot) -> None:
        """No gradient does; a round is over when ``slot`` has got its own."""


class Handover:
    """Takes gradients from the framework and gives them back; without one, they have no other."""

    def __init__(self) -> None:
        #: gradients and steps are the framework's at the moment
        self.off = False
        #: they are for a while, and will be the session's again
        self.is_lent = False
        #: whom they can be lent to
        self.borrower: Borrower | None = None
        #: of the session, where it has any
        self.hooks: Hooks | None = None
        #: raises if gradients that are the framework's at the moment are not complete
        self.check: Callable[[], None] = _nothing
        self._take: Callable[[], Callable[[], None]] = _taken_by_none
        self._give_back: Callable[[], None] = _nothing
        self._can_stop = False

    def use(
        self,
        take: Callable[[], Callable[[], None]],
        *,
        can_stop: bool,
        borrower: Borrower | None = None,
    ) -> None:
        """``take`` makes gradients the session's; what it returns makes them the framework's.

        With ``can_stop``, both may happen several times.
        """
        self.borrower = borrower
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
        if self.borrower is not None:
            self.borrower.give_back()
        give_back, self._give_back = self._give_back, _nothing
        give_back()


def _taken_by_none() -> Callable[[], None]:
    return _nothing


def _nothing() -> None:
    pass
