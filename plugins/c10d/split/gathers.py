"""What comes from other owners in phase two, awaited from both ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from bytesched.task import CommTask

__all__ = ["Gathers"]

#: a chunk, who sends it, and the receive
_Gather = tuple[CommTask, int, Any]


class Gathers:
    """The sums of one round that other ranks send.

    Those of the back layers come while backward computes the front ones, which everything else
    then waits for: so one thread waits for the front ones first, and one for the back ones.

    Args:
        changed: guards this, and is notified when a round begins or everything is over.
        is_over: whether nothing comes any more; called under the lock.
        has_begun: waits until a round has begun, by number; false if there will be none.
        receive: begins to receive a round's chunks, which are given front first.
        arrived: waits for the end of such a receive, and does what follows.
    """

    def __init__(
        self,
        changed: threading.Condition,
        *,
        is_over: Callable[[], bool],
        has_begun: Callable[[int], bool],
        receive: Callable[[], Iterable[_Gather]],
        arrived: Callable[[CommTask, int, Any], None],
    ) -> None:
        self._changed = changed
        self._is_over = is_over
        self._has_begun = has_begun
        self._receive = receive
        self._arrived = arrived
        #: nobody waits for them yet
        self._waiting: deque[_Gather] = deque()

    def run_front(self) -> None:
        """Begins every round; a thread of its own."""
        number = 0
        while self._has_begun(number := number + 1):
            works = tuple(self._receive())
            with self._changed:
                self._waiting.extend(works)
                self._changed.notify_all()
            while self._take(self._waiting.popleft):
                pass

    def run_back(self) -> None:
        """Another one."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over() or self._waiting)
                if self._is_over():
                    return
            self._take(self._waiting.pop)

    def _take(self, take: Callable[[], _Gather]) -> bool:
        """Waits for one of them; false if another thread waits for the last."""
        with self._changed:
            if not self._waiting:
                return False
            gather = take()
        self._arrived(*gather)
        return True

    def __repr__(self) -> str:
        return f"<Gathers {len(self._waiting)} not waited for>"
