"""The tuners of restless.py, on Horovod."""

from __future__ import annotations

from horovod_training import HorovodJob
from restless import RestlessJob, ScriptedJob


class RestlessHorovodJob(RestlessJob, HorovodJob):
    """A Horovod job whose wrapped run is tuned all the time."""


class ScriptedHorovodJob(ScriptedJob, HorovodJob):
    """A Horovod job whose wrapped run passes through given settings."""
