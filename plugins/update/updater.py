"""The updater's thread: applies the update of bundles whose gradients are complete."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any

from ..dependency.progress import Progress
from ..figures.meter import Meter
from ..layout.slots import Bundle, Job, Slot, Update
from ..proxies.spans import span
from ..routes.streams import Streams

__all__ = ["Updater"]

#: Bundles that are ready together are updated in one call up to this size: fewer calls, but the
#: front layer does not wait for the update of the whole model.
_BATCH_BYTES = 4 * 2**20


class Updater:
    """Front layers first; runs beside the user's thread, which waits only for what it needs."""

    def __init__(self, progress: Progress, streams: Streams, meter: Meter) -> None:
        self._progress = progress
        self._streams = streams
        self._meter = meter
        self._ready: list[tuple[int, int, Bundle]] = []
        self._sequence = 0
        #: one for each bundle. Not a semaphore, which is made of several calls
        self._pushed: SimpleQueue[None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="bytesched-updater", daemon=True)
        self._thread.start()

    def push(self, bundles: Iterable[Bundle]) -> None:
        """These can be updated now; called with the lock of ``progress`` held."""
        for bundle in bundles:
            heapq.heappush(self._ready, (bundle.index, self._sequence, bundle))
            self._sequence += 1
            self._pushed.put(None)

    def close(self) -> None:
        """Stops the thread; what was not begun stays undone."""
        self._closed = True
        self._pushed.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        self._progress.updater = threading.get_ident()
        while True:
            self._pushed.get()
            if self._closed:
                return
            # In a function of its own: its variables keep optimizers alive.
            try:
                self._apply()
            except BaseException as error:  # noqa: BLE001 - it must reach the user's thread
                self._progress.fail(error)
                return

    def _apply(self) -> None:
        with self._progress.lock:
            bundles, jobs = self._take()
        if not jobs:
            return
        began_ns = perf_counter_ns()
        with self._streams.update(), span("bytesched::update"):
            _update(jobs)
        slots = [slot for job in jobs for slot in job.slots]
        # Before the update counts as applied: then nothing of ours holds the optimizer.
        jobs.clear()
        self._meter.updated(bundles[0].slots[0].name, len(bundles), began_ns)
        with self._progress.lock:
            self._progress.round.updated(bundles, slots)
            self._progress.notify()

    def _take(self) -> tuple[list[Bundle], list[Job]]:
        """The next bundles and their jobs; a bundle that was pushed twice has none left."""
        bundles: list[Bundle] = []
        jobs: list[Job] = []
        nbytes = 0
        while self._ready and nbytes < _BATCH_BYTES:
            bundle = heapq.heappop(self._ready)[2]
            if taken := self._progress.round.take(bundle):
                bundles.append(bundle)
                jobs.extend(taken)
                nbytes += bundle.nbytes
        return bundles, jobs


def _update(jobs: list[Job]) -> None:
    calls: dict[int, tuple[Update, dict[int, tuple[dict[str, Any], list[Slot]]]]] = {}
    for job in jobs:
        _, groups = calls.setdefault(id(job.by), (job.by, {}))
        group = groups.setdefault(id(job.hyperparameters), (job.hyperparameters, []))
        group[1].extend(job.slots)
    for by, groups in calls.values():
        by.update(list(groups.values()))
