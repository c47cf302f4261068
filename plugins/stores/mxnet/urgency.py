"""How urgent the keys of a trainer are: what backward computes last is needed first."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from time import monotonic

from bytesched.kvstore.protocol import Key

#: the first step in which a trainer does not make its keys
_FIRST_STEP = 2
#: A gradient was not there when it was asked for if it came after such a share of an iteration;
#: the engine, which has several threads, takes some time over others too, and in any order.
_WAITED_SHARE = 0.05


class Urgency:
    """Learns from one step of a trainer in which order its gradients are computed.

    A trainer that makes its keys first, or waits for all gradients, finds them all there, and the
    order in which the engine hands them over has no meaning. So a step counts if most of them came
    late. Until then the priorities are those of the calls. Any thread may use it.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._learned: dict[Key, int] = {}
        #: the step that is watched, and the last that has begun
        self._step = _FIRST_STEP
        self._latest = 0
        self._clear()

    def _clear(self) -> None:
        #: its calls, in order, when the first and the last was made, and its whole time
        self._called: list[Key] = []
        self._first_s = self._last_s = 0.0
        self._iteration_s: float | None = None
        #: those that have begun, in order, how many of these before the last call, and when
        self._began: list[Key] = []
        self._sooner = 0
        self._began_s: list[float] = []

    def called(self, key: Key, step: int) -> None:
        """A push of ``key`` was asked for, its ``step``-th, from 1."""
        with self._lock:
            if self._learned:
                return
            self._latest = max(self._latest, step)
            if step == self._step:
                self._last_s = self._clock()
                if not self._called:
                    self._first_s = self._last_s
                self._called.append(key)
                self._sooner = len(self._began)
            elif self._called and key == self._called[0] and self._iteration_s is None:
                self._iteration_s = self._clock() - self._first_s
                self._learn()

    def began(self, key: Key, step: int, priority: int) -> int:
        """The gradient of that push is there; returns what to use for ``priority``."""
        with self._lock:
            # A caller may be a step ahead: what begins then is of the step before.
            if not self._learned and step == self._step:
                self._began.append(key)
                self._began_s.append(self._clock())
                self._learn()
            return self._learned.get(key, priority)

    def _learn(self) -> None:
        if self._iteration_s is None or len(self._began) < len(self._called):
            return
        late_s = self._last_s + _WAITED_SHARE * self._iteration_s
        if 2 * sum(began_s > late_s for began_s in self._began_s) > len(self._called):
            waited = self._began[self._sooner :]
            # A trainer calls for the front layers first.
            others = [key for key in reversed(self._called) if key not in waited]
            self._learned = {key: -place for place, key in enumerate([*others, *waited])}
        self._step = self._latest + 1
        self._clear()
