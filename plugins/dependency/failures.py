"""What went wrong with a session: the first error is final, and every rank learns of it."""

from __future__ import annotations

import threading
from typing import NoReturn, Protocol

from bytesched.errors import PeerLost, TransportError, in_one_line

__all__ = ["Failures", "Peers"]


class Peers(Protocol):
    """The other ranks, as far as an error concerns them."""

    def leave_note(self, text: str) -> None:
        """Says why this rank stops, for the others to show beside their own error."""

    def abort(self) -> None:
        """What is under way ends in errors here and on the other ranks. Idempotent, any thread."""


class Failures:
    """The first error of a session.

    Args:
        peers: aborted when something goes wrong, so that every rank fails.
    """

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
        self,
        error: BaseException,
        *,
        is_raised: bool = False,
        cause: BaseException | None = None,
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
