"""Sections in which schedulers of this process start nothing new."""

from __future__ import annotations

import weakref
from typing import Any

_schedulers: weakref.WeakSet[Any] = weakref.WeakSet()


class Section:
    """An urgent section that has begun."""

    def __init__(self, schedulers: list[Any]) -> None:
        self._schedulers = schedulers

    def end(self) -> None:
        """Lets go."""
        schedulers, self._schedulers = self._schedulers, []
        for scheduler in schedulers:
            scheduler.act(scheduler.core.release)


def begin(name: str = "urgent") -> Section:
    """A section, until its `end`."""
    schedulers = list(_schedulers)
    for scheduler in schedulers:
        scheduler.act(lambda core=scheduler.core: core.hold() or ())
    return Section(schedulers)
