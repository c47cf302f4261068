"""The tuner that never rests, on Horovod."""

from __future__ import annotations

from horovod_training import HorovodJob
from restless import RestlessJob


class RestlessHorovodJob(RestlessJob, HorovodJob):
    """A Horovod job whose wrapped run is tuned all the time."""
