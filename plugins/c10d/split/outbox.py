"""What one rank sends to another: the most urgent message first, and few at a time."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from bytesched.task import CommTask

__all__ = ["Outbox"]


class Outbox:
    """A queue of chunks for one other rank, and the thread that sends them.

    Args:
        lock: guards this.
        is_over: whether nothing is sent any more; called under the lock.
        window: how many messages of a phase and before it may be under way; under the lock.
        begin: starts to send a chunk, and returns the work.
        end: waits for the end of such a work.
        is_held: whether something else goes before all that is here; under the lock.
        emptied: called when nothing waits to be sent any more; under the lock.
    """

    def __init__(
        self,
        lock: threading.RLock,
        *,
        is_over: Callable[[], bool],
        window: Callable[[int], int],
        begin: Callable[[CommTask], Any],
        end: Callable[[Any, CommTask], None],
        is_held: Callable[[], bool],
        emptied: Callable[[], None],
    ) -> None:
        # Of its own: what is put here concerns no other thread.
        self._changed = threading.Condition(lock)
        self._is_over = is_over
        self._window = window
        self._begin = begin
        self._end = end
        self._is_held = is_held
        self._emptied = emptied
        self._queue: list[tuple[int, int, CommTask]] = []
        self._under_way = 0

    @property
    def is_waiting(self) -> bool:
        """Whether anything is to be sent that has not begun. Under the lock."""
        return bool(self._queue)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be sent or under way. Under the lock."""
        return not self._queue and not self._under_way

    def put(self, phase: int, place: int, chunk: CommTask) -> None:
        """Enqueues ``chunk``; lower phases go first, and in a phase lower places. Under the lock.

        No two chunks of a phase have one place.
        """
        heapq.heappush(self._queue, (phase, place, chunk))
        self._changed.notify()

    def wake(self) -> None:
        """It may be over, or not held any more. Under the lock."""
        self._changed.notify()

    def run(self) -> None:
        """Sends until it is over. A thread of its own."""
        under_way: deque[tuple[Any, CommTask]] = deque()
        while True:
            with self._changed:
                self._under_way = len(under_way)
                self._changed.wait_for(lambda: self._is_over() or self._may_send() or under_way)
                if self._is_over():
                    return
                chunk = self._next()
            if chunk is None:
                self._end(*under_way.popleft())
            else:
                under_way.append((self._begin(chunk), chunk))

    def _may_send(self) -> bool:
        return bool(self._queue) and not self._is_held()

    def _next(self) -> CommTask | None:
        """What is to be sent now, if there is room for it."""
        if not self._may_send() or self._under_way >= self._window(self._queue[0][0]):
            return None
        self._under_way += 1
        chunk = heapq.heappop(self._queue)[2]
        if not self._queue:
            self._emptied()
        return chunk

    def __repr__(self) -> str:
        return f"<Outbox {len(self._queue)} waiting>"
