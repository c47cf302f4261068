"""How urgent the keys of a trainer are: what backward computes last is needed first."""

from __future__ import annotations

from threading import Lock

from bytesched.kvstore import Key

__all__ = ["Urgency"]


class Urgency:
    """Learns from one step of a trainer in which order its gradients are computed.

    A call that begins after the last call of its step was made has waited for its gradient, and
    tells when that was computed. One that begins sooner tells nothing: a trainer that makes its
    keys first, or waits for all gradients, finds them all there. So a step counts if most calls
    have waited. Until then the priorities are those of the calls. Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._learned: dict[Key, int] = {}
        #: what every step begins with
        self._first: Key | None = None
        #: calls of the step that is watched, in order, and whether these are all
        self._called: list[Key] = []
        self._is_whole = False
        #: those that have begun, in order, and how many of these before the last call
        self._began: list[Key] = []
        self._sooner = 0

    def called(self, key: Key) -> None:
        """A push of ``key`` was asked for."""
        with self._lock:
            if self._learned:
                return
            if self._first is None:
                self._first = key
            if self._called and key == self._first:
                self._is_whole = True
                self._learn()
            if not self._is_whole and (self._called or key == self._first):
                self._called.append(key)
                self._sooner = len(self._began)

    def began(self, key: Key, priority: int) -> int:
        """The gradient of ``key`` is there; returns what to use for ``priority``."""
        with self._lock:
            if not self._learned and key in self._called and key not in self._began:
                self._began.append(key)
                self._learn()
            return self._learned.get(key, priority)

    def _learn(self) -> None:
        if not self._is_whole or len(self._began) < len(self._called):
            return
        waited = self._began[self._sooner :]
        if 2 * len(waited) > len(self._called):
            # A trainer calls for the front layers first.
            others = [key for key in reversed(self._called) if key not in waited]
            self._learned = {key: -place for place, key in enumerate([*others, *waited])}
        self._called, self._began, self._is_whole, self._sooner = [], [], False, 0
