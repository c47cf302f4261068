"""The updater's thread: applies the update of bundles whose gradients are complete."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Any

from bytesched.plugins.meter import Meter
from bytesched.plugins.plan import Bundle, Slot
from bytesched.plugins.streams import Streams
from bytesched.plugins.update import Deferred

__all__ = ["Updater"]

#: Bundles that are ready together are updated in one call up to this size: fewer calls, but the
#: front layer does not wait for the update of the whole model.
_BATCH_BYTES = 4 * 2**20


class Updater:
    """Front layers first; runs beside the user's thread, which waits only for what it needs.

    Args:
        lock: guards bundles; ``push`` and ``updated`` are called with it held.
        updated: told which bundles are done.
        failed: told about an exception of the optimizer.
    """

    def __init__(
        self,
        lock: threading.Condition,
        streams: Streams,
        meter: Meter,
        updated: Callable[[Iterable[Bundle]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._lock = lock
        self._streams = streams
        self._meter = meter
        self._updated = updated
        self._failed = failed
        self._ready: list[tuple[int, Bundle]] = []
        self._pushed = threading.Semaphore(0)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="bytesched-updater", daemon=True)
        self._thread.start()

    def push(self, bundles: Iterable[Bundle]) -> None:
        """These can be updated now."""
        for bundle in bundles:
            heapq.heappush(self._ready, (bundle.index, bundle))
            self._pushed.release()

    def close(self) -> None:
        """Stops the thread; what was not begun stays undone."""
        self._closed = True
        self._pushed.release()
        self._thread.join(5.0)

    def _run(self) -> None:
        while self._pushed.acquire() and not self._closed:
            with self._lock:
                batch = self._take()
            if not batch:
                continue
            began_ns = perf_counter_ns()
            try:
                with self._streams.update():
                    _update(batch)
            except BaseException as error:  # noqa: BLE001 - it must reach the user's thread
                self._failed(error)
                return
            self._meter.updated(batch, began_ns)
            with self._lock:
                self._updated(batch)

    def _take(self) -> list[Bundle]:
        batch: list[Bundle] = []
        nbytes = 0
        while self._ready and nbytes < _BATCH_BYTES:
            _, bundle = heapq.heappop(self._ready)
            batch.append(bundle)
            nbytes += bundle.nbytes
        return batch


def _update(batch: list[Bundle]) -> None:
    calls: dict[int, tuple[Deferred, dict[int, tuple[dict[str, Any], list[Slot]]]]] = {}
    for bundle in batch:
        for deferred, snapshot, slots in bundle.jobs:
            _, groups = calls.setdefault(id(deferred), (deferred, {}))
            groups.setdefault(id(snapshot), (snapshot, []))[1].extend(slots)
    for deferred, groups in calls.values():
        deferred.update(list(groups.values()))
