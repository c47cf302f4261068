"""From a reduced chunk to the updates and waits that it was missing for."""

from __future__ import annotations

from bytesched.task import CommTask

from ..dependency.progress import Progress
from ..layout.plan import Plan
from .updater import Updater

__all__ = ["Completions"]


class Completions:
    """What a carrier reports to.

    Args:
        plan: the chunks.
        updater: given the bundles that were only waiting for a chunk.
    """

    def __init__(self, plan: Plan, progress: Progress, updater: Updater) -> None:
        self._plan = plan
        self._progress = progress
        self._updater = updater

    def reduced(self, chunk: CommTask) -> None:
        """The sum of ``chunk`` is in the arena. A thread of the carrier."""
        with self._progress.lock:
            if chunk is self._plan.flags_chunk:
                self._plan.flags_reduced = True
            if ready := self._progress.round.summed(chunk):
                self._updater.push(ready)
            self._progress.notify()
