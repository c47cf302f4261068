"""A device that several processes of a host share, emulated: each gets an equal part of it."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from typing import Final

from .emulated import Pace

__all__ = ["SharedPace"]

#: how long a job computes before it looks who else does, as a device's slices of time
_SLICE_S: Final = 0.002
_MOST_JOBS: Final = 64


class SharedPace(Pace):
    """Of n jobs that compute at a time, each takes n times as long, as with slices of time.

    Switching costs nothing here, and memory and caches are not shared: more than a device can do.

    Args:
        device: a file that the processes of a host have in common.
        job: number of this process among them.
    """

    def __init__(self, device: Path, job: int) -> None:
        super().__init__()
        self._job = job
        with device.open("a+b") as file:
            file.truncate(_MOST_JOBS)
            #: a byte for each job: 1 while it computes
            self._computing = mmap.mmap(file.fileno(), _MOST_JOBS)

    def start(self) -> None:
        super().start()
        self._computing[self._job] = 1

    def finish(self, duration_s: float) -> None:
        left_s, at_s = duration_s - self._late_s, self._start_s
        while True:
            jobs = sum(self._computing[:])
            now_s = time.perf_counter()
            left_s -= (now_s - at_s) / jobs
            at_s = now_s
            if left_s <= 0:
                break
            time.sleep(min(left_s * jobs, _SLICE_S))
        self._computing[self._job] = 0
        self._end_s = time.perf_counter()
        self._end_cpu_s = time.thread_time()
        self._late_s = -left_s
