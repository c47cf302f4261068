"""What one rank sends to another: the most urgent message first, and few at a time."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

from bytesched.plugins.c10d.split.forecast import Forecast
from bytesched.task import CommTask

__all__ = ["FIRST_PHASE", "Outbox"]

FIRST_PHASE: Final = 0

#: after which a message that had no room is looked at again, if nothing else happens
_PATIENCE_S: Final = 0.01


class Outbox:
    """A queue of chunks for one other rank, and the thread that sends them.

    A message of a later phase waits where it would delay the end of the first (see Forecast).

    Args:
        changed: guards this, and is notified when something is put in.
        is_over: whether nothing is sent any more; called under the lock.
        window: how many messages of a phase and before it may be under way; under the lock.
        begin: starts to send a chunk, and returns the work.
        end: waits for the end of such a work.
    """

    def __init__(
        self,
        changed: threading.Condition,
        *,
        is_over: Callable[[], bool],
        window: Callable[[int], int],
        begin: Callable[[CommTask], Any],
        end: Callable[[Any, CommTask], None],
    ) -> None:
        self._changed = changed
        self._is_over = is_over
        self._window = window
        self._begin = begin
        self._end = end
        self._queue: list[tuple[int, int, CommTask]] = []
        self._forecast = Forecast()

    def begin_round(self) -> None:
        """A round begins. Under the lock."""
        self._forecast.begin_round(perf_counter())

    def put(self, phase: int, place: int, chunk: CommTask) -> None:
        """Enqueues ``chunk``; lower phases go first, and in a phase lower places. Under the lock.

        No two chunks of a phase have one place.
        """
        if phase == FIRST_PHASE:
            self._forecast.put(perf_counter(), chunk.nbytes)
        heapq.heappush(self._queue, (phase, place, chunk))

    def run(self) -> None:
        """Sends until it is over. A thread of its own."""
        under_way: deque[tuple[Any, CommTask, float]] = deque()
        while True:
            with self._changed:
                while not (self._is_over() or (chunk := self._next(len(under_way))) or under_way):
                    self._changed.wait(_PATIENCE_S if self._queue else None)
                if self._is_over():
                    return
            if chunk is not None:
                under_way.append((self._begin(chunk), chunk, perf_counter()))
                continue
            work, chunk, began_s = under_way.popleft()
            self._end(work, chunk)
            self._forecast.sent(began_s, perf_counter(), chunk.nbytes)

    def _next(self, under_way: int) -> CommTask | None:
        """The next message, if it may begin beside so many. Under the lock."""
        if not self._queue:
            return None
        phase, _, chunk = self._queue[0]
        if under_way >= self._window(phase):
            return None
        if phase != FIRST_PHASE and not self._forecast.has_room(perf_counter(), chunk.nbytes):
            return None
        heapq.heappop(self._queue)
        return chunk

    def __repr__(self) -> str:
        return f"<Outbox {len(self._queue)} waiting, {self._forecast!r}>"
