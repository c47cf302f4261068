"""How far a round is, and what went wrong: shared by the user's thread and ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from bytesched.errors import PluginError
from bytesched.round import Round
from bytesched.share.turn import HELD, released
from bytesched.urgency import URGENCY

from ..layout.slots import Job, Slot
from ..routes.backend import Backend
from .failures import Failures

__all__ = ["Progress"]

#: how often a wait checks for lost peers
_LOOKS_EVERY_S: Final = 1.0


class Progress(Failures):
    """A lock, what it guards, and the one way to wait for it: with a deadline, and for errors.

    Args:
        backend: aborted when something goes wrong, so that every rank fails.
        slots: the parameters whose rounds these are; none where there are no rounds.
    """

    def __init__(self, backend: Backend, slots: Sequence[Slot] = ()) -> None:
        super().__init__(backend)
        self._backend = backend
        self._timeout_s = backend.timeout_s
        self._waiters = 0
        # Not entered by the condition, which would cost two more calls each time.
        self._changed = threading.Condition(self.lock)
        self.round: Round[Slot, Job] = Round(slots)
        #: what the scheduler knows, for the message of a timeout
        self.story: Callable[[], str] = str
        #: the thread that applies updates: they would wait for each other
        self.updater: int | None = None
        #: the error of something that is waited for and cannot come, if it knows of one
        self.look: Callable[[], BaseException | None] = lambda: None

    @property
    def outstanding(self) -> int:
        """Chunks that are under way."""
        return len(self.round.unsummed)

    def notify(self) -> None:
        """Something changed; called with the lock held."""
        if self._waiters:
            self._changed.notify_all()

    def refuse_in_update(self, what: str) -> None:
        """Raises PluginError in the thread that applies updates, where nothing may wait."""
        if threading.get_ident() == self.updater:
            raise PluginError(
                f"the update of a parameter uses {what}, which may be outstanding itself, on rank "
                f"{self._backend.rank}: this optimizer does not update each parameter on its own. "
                "Do not vouch for its class by bytesched.separable, or set cross_barrier = False"
            )

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Returns when ``done()``; raises the first error, or SchedulerTimeout."""
        self.refuse_in_update(what)
        if URGENCY.is_held:
            with URGENCY.waiting():
                return self.wait(done, what)
        if HELD and not self._done_by(0.0, done):
            with released():
                return self.wait(done, what)
        deadline = monotonic() + self._timeout_s
        while not self._done_by(min(deadline, monotonic() + _LOOKS_EVERY_S), done):
            self.check()
            if monotonic() < deadline:
                error = self.look()
            else:
                error = self._backend.timeout(
                    f"waited {self._timeout_s:g} s for {what}", self._whole_story
                )
            if error is not None:
                self.fail(error, is_raised=True)
                raise error

    def _whole_story(self) -> str:
        with self.lock:
            here = self.round.story()
        return "\n".join(filter(None, (self.story(), here)))

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
