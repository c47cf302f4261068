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
        #: the step that is watched, whether all its calls were made, and the last that has begun
        self._step = 1
        self._is_whole = False
        self._latest = 1
        #: its calls, in order
        self._called: list[Key] = []
        #: those that have begun, in order, and how many of these before the last call
        self._began: list[Key] = []
        self._sooner = 0

    def called(self, key: Key, step: int) -> None:
        """A push of ``key`` was asked for, its ``step``-th, from 1."""
        with self._lock:
            if self._learned:
                return
            self._latest = max(self._latest, step)
            if step == self._step:
                self._called.append(key)
                self._sooner = len(self._began)
            elif self._called and key == self._called[0]:
                self._is_whole = True
                self._learn()

    def began(self, key: Key, step: int, priority: int) -> int:
        """The gradient of that push is there; returns what to use for ``priority``."""
        with self._lock:
            # A caller may be a step ahead: what begins then is of the step before.
            if not self._learned and step == self._step:
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
        self._step, self._is_whole = self._latest + 1, False
        self._called, self._began, self._sooner = [], [], 0
