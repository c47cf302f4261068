"""What threads of ours have come to, and what went wrong: shared with the user's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Final

from bytesched.errors import SchedulerTimeout
from bytesched.share.turn import HELD, released
from bytesched.urgency import URGENCY

from ..routes.groups.group import Group
from .failures import Failures

__all__ = ["Progress"]

#: how often a wait checks for lost peers
_LOOKS_EVERY_S: Final = 1.0


class Progress(Failures):
    """A lock, what it guards, and the one way to wait for it: with a deadline, and for errors.

    Args:
        group: aborted when something goes wrong, so that every rank fails.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._group = group
        self._waiters = 0
        # Not entered by the condition, which would cost two more calls each time.
        self._changed = threading.Condition(self.lock)
        #: what the scheduler knows, for the message of a timeout
        self.story: Callable[[], str] = str
        #: the error of something that is waited for and cannot come, if it knows of one
        self.look: Callable[[], BaseException | None] = lambda: None

    def notify(self) -> None:
        """Something changed; called with the lock held."""
        if self._waiters:
            self._changed.notify_all()

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Returns when ``done()``; raises the first error, or SchedulerTimeout."""
        if URGENCY.is_held:
            with URGENCY.waiting():
                return self.wait(done, what)
        if HELD and not self._done_by(0.0, done):
            with released():
                return self.wait(done, what)
        timeout_s = self._group.timeout_s
        deadline = monotonic() + timeout_s
        while not self._done_by(min(deadline, monotonic() + _LOOKS_EVERY_S), done):
            self.check()
            error = self.look()
            if error is None and monotonic() >= deadline:
                error = SchedulerTimeout(
                    f"waited {timeout_s:g} s for {what}{self._group.note()}",
                    rank=self._group.rank,
                    story=self.story().splitlines(),
                )
            if error is not None:
                self.fail(error, is_raised=True)
                raise error

    def _done_by(self, deadline: float, done: Callable[[], bool]) -> bool:
        """Waits until ``done()``, the first error, or a moment of the clock; whether it is done.

        Any thread; ``done`` is called with the lock held.
        """
        with self.lock:
            self._waiters += 1
            try:
                while not done() and self.error is None and monotonic() < deadline:
                    self._changed.wait(deadline - monotonic())
                return done()
            finally:
                self._waiters -= 1

    def _failed(self) -> None:
        self._changed.notify_all()
