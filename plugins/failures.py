"""What went wrong with a session: the first error is final, and every rank learns of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Final, NoReturn, Protocol

from bytesched.errors import PeerLost, PluginError, SchedulerTimeout, TransportError, in_one_line
from bytesched.share.turn import HELD, released

from .routes.group import Group


class Peers(Protocol):
    """The other ranks, as far as an error concerns them."""

    def leave_note(self, text: str) -> None:
        """Says why this rank stops, for the others to show beside their own error."""

    def abort(self) -> None:
        """What is under way ends in errors here and on the other ranks. Idempotent, any thread."""


class Failures:
    """The first error of a session."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        #: guards what the session waits for
        self.lock = threading.RLock()
        #: the first error, which is final
        self.error: BaseException | None = None
        #: it, or what came of it, was raised in the user's thread
        self.is_error_seen = False

    def check(self) -> None:
        """Raises the first error, if there was one."""
        if self.error is not None:
            self.is_error_seen = True
            # Without what earlier raises added: their frames keep batches and outputs alive.
            raise self.error.with_traceback(None)

    def raise_first(self, error: BaseException) -> NoReturn:
        """Fails with ``error`` and raises it, or what came before it and has brought it about.

        The user's thread.
        """
        self.fail(error, is_raised=True)
        first = self.error
        if first is None or not isinstance(error, TransportError):
            raise error
        # This rank has broken its connections for it: of those, only a timeout would be told.
        raise first.with_traceback(None) from first.__cause__

    def fail(
        self, error: BaseException, *, is_raised: bool = False, cause: BaseException | None = None
    ) -> None:
        """The first error is kept and raised wherever the user's thread waits. Any thread.

        It ends everything under way, so that the other ranks learn about it now.

        Args:
            is_raised: the user's thread raises it now, so that the end of the process need not.
            cause: what the other ranks are told, if it is another error.
        """
        with self.lock:
            self.is_error_seen = self.is_error_seen or is_raised
            if self.error is not None:
                return
            self.error = error
            self._failed()
        # Without the lock: a store that does not answer may take its time.
        if not isinstance(error, PeerLost) or error.peers:
            self._peers.leave_note(in_one_line(cause or error))
        self._peers.abort()

    def _failed(self) -> None:
        """There is an error; called with the lock held."""


#: how often a wait checks for lost peers
_LOOKS_EVERY_S: Final = 1.0


class Progress(Failures):
    """A lock, what it guards, and the one way to wait for it: with a deadline, and for errors."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._group = group
        self._changed = threading.Condition(self.lock)
        #: what is still to come, for the message of a timeout
        self.story: Callable[[], str] = str
        #: the error of something that is waited for and cannot come, if it knows of one
        self.look: Callable[[], BaseException | None] = lambda: None

    def notify(self) -> None:
        """Something changed; called with the lock held."""
        self._changed.notify_all()

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Returns when ``done()``; raises the first error, or SchedulerTimeout."""
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
            left_s = max(0.0, deadline - monotonic())
            self._changed.wait_for(lambda: self.error is not None or done(), left_s)
            return done()

    def _failed(self) -> None:
        self._changed.notify_all()


def refuse(name: str) -> NoReturn:
    """``name`` is used in a forked child, where it will not come."""
    raise PluginError(
        f"{name!r} was outstanding when this process was forked, and nothing completes it here"
    )
