"""Looks for lost ranks while the thread that trains waits where Python cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Final

__all__ = ["Lookout"]

#: how long a backward pass may take before connections are looked at, and again
_LOOKS_EVERY_S: Final = 1.0


class Lookout:
    """A thread that looks at the connections during long backward passes.

    Gloo reports a broken connection to what waits for it, but not to what is half sent or half
    received.

    Args:
        lost: the error of a connection that is broken, if one is.
        fail: is called with it, once, and ends what waits.
    """

    def __init__(
        self, lost: Callable[[], BaseException | None], fail: Callable[[BaseException], None]
    ) -> None:
        self._lost = lost
        self._fail = fail
        #: since when a backward pass has been under way; 0: none is
        self._since_s = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bytesched-lookout", daemon=True)
        self._thread.start()

    def backward_begins(self) -> None:
        """A backward pass begins."""
        self._since_s = monotonic()

    def backward_ends(self) -> None:
        """It is over."""
        self._since_s = 0.0

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closed.wait(_LOOKS_EVERY_S):
            since_s = self._since_s
            if since_s and monotonic() - since_s > _LOOKS_EVERY_S:
                error = self._lost()
                if error is not None and not self._closed.is_set():
                    self._fail(error)
                    return
