"""What comes from other owners in phase two, awaited from both ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

__all__ = ["Gather", "Gathers"]

#: waits for the end of a receive, and does what follows
Gather: TypeAlias = Callable[[], None]


class Gathers:
    """The sums of one round that other ranks send.

    Those of the back layers come while backward computes the front ones, which everything else
    then waits for: so one thread waits for the front ones first, and one for the back ones.

    Args:
        lock: guards this.
        is_over: whether nothing comes any more; called under the lock.
        has_begun: whether a round has begun whose chunks are to be received; under the lock.
        receive: begins to receive these chunks; returns what is to follow, front first.
    """

    def __init__(
        self,
        lock: threading.RLock,
        *,
        is_over: Callable[[], bool],
        has_begun: Callable[[], bool],
        receive: Callable[[], Iterable[Gather]],
    ) -> None:
        self._changed = threading.Condition(lock)
        self._is_over = is_over
        self._has_begun = has_begun
        self._receive = receive
        #: nobody waits for them yet
        self._waiting: deque[Gather] = deque()

    def add(self, gathers: Iterable[Gather]) -> None:
        """These are being received, front first."""
        with self._changed:
            self._waiting.extend(gathers)
            self._changed.notify_all()

    def _add_first(self, gathers: Sequence[Gather]) -> None:
        """This thread waits for nothing else before these.

        Others may have been added by now that depend on them: a rank that waits for a norm of such
        a sum sends no parameters.
        """
        with self._changed:
            self._waiting.extendleft(reversed(gathers))
            self._changed.notify_all()

    def wake(self) -> None:
        """A round has begun, or it may be over. Under the lock."""
        self._changed.notify_all()

    def run_front(self) -> None:
        """Begins every round; a thread of its own."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_over() or self._has_begun() or self._waiting
                )
                if self._is_over():
                    return
                begins = self._has_begun()
            if begins:
                self._add_first(tuple(self._receive()))
            else:
                self._take(self._waiting.popleft)

    def run_back(self) -> None:
        """Another one."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over() or self._waiting)
                if self._is_over():
                    return
            self._take(self._waiting.pop)

    def _take(self, take: Callable[[], Gather]) -> None:
        """Waits for one of them, unless another thread waits for the last."""
        with self._changed:
            if not self._waiting:
                return
            gather = take()
        gather()

    def __repr__(self) -> str:
        return f"<Gathers {len(self._waiting)} not waited for>"
