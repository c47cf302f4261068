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
    """

    def __init__(
        self,
        lock: threading.RLock,
        *,
        is_over: Callable[[], bool],
        window: Callable[[int], int],
        begin: Callable[[CommTask], Any],
        end: Callable[[Any, CommTask], None],
    ) -> None:
        # Of its own: what is put here concerns no other thread.
        self._changed = threading.Condition(lock)
        self._is_over = is_over
        self._window = window
        self._begin = begin
        self._end = end
        self._queue: list[tuple[int, int, CommTask]] = []

    def put(self, phase: int, place: int, chunk: CommTask) -> None:
        """Enqueues ``chunk``; lower phases go first, and in a phase lower places. Under the lock.

        No two chunks of a phase have one place.
        """
        heapq.heappush(self._queue, (phase, place, chunk))
        self._changed.notify()

    def wake(self) -> None:
        """It may be over. Under the lock."""
        self._changed.notify()

    def run(self) -> None:
        """Sends until it is over. A thread of its own."""
        under_way: deque[tuple[Any, CommTask]] = deque()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over() or self._queue or under_way)
                if self._is_over():
                    return
                is_next = self._queue and len(under_way) < self._window(self._queue[0][0])
                chunk = heapq.heappop(self._queue)[2] if is_next else None
            if chunk is None:
                self._end(*under_way.popleft())
            else:
                under_way.append((self._begin(chunk), chunk))

    def __repr__(self) -> str:
        return f"<Outbox {len(self._queue)} waiting>"
