"""Observers: what watches a run (timeline, tests, tuners) without being able to break it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

__all__ = ["Observer", "Observers"]

log = logging.getLogger("bytesched")


class Observer:
    """Optional hooks; all do nothing here. Called from any thread.

    Times are ``time.perf_counter_ns()``. Tracks are ``step``, ``forward``, ``backward``,
    ``queue``, ``send``, ``update``, ``urgent`` and ``wait``, and ``graph`` of layers of
    ``bytesched.plugins.graphs``.
    """

    def on_span(
        self, track: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None
    ) -> None:
        """Something took from ``start_ns`` to ``end_ns``."""

    def on_step(self, step: int, at_ns: int) -> None:
        """The optimizer's ``step`` number ``step`` returned."""

    def close(self) -> None:
        """No more calls will come."""


class Observers:
    """Fans out to observers; one that raises is logged and removed, never fatal."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)
        #: whether there is one; asked in front of everything that may be observed
        self.are_any = bool(self._observers)

    def add(self, observer: Observer) -> None:
        """``observer`` is called from now on."""
        self._observers.append(observer)
        self.are_any = True

    def remove(self, observer: Observer) -> None:
        """``observer`` is called no more; it may have been removed for raising."""
        if observer in self._observers:
            self._observers.remove(observer)
        self.are_any = bool(self._observers)

    def __bool__(self) -> bool:
        return self.are_any

    def on_span(
        self, track: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None
    ) -> None:
        self._tell("on_span", track, name, start_ns, end_ns, args)

    def on_step(self, step: int, at_ns: int) -> None:
        self._tell("on_step", step, at_ns)

    def close(self) -> None:
        self._tell("close")
        self._observers.clear()
        self.are_any = False

    def _tell(self, hook: str, *args: Any) -> None:
        for observer in tuple(self._observers):
            try:
                getattr(observer, hook)(*args)
            except Exception:
                log.exception("%r raised in %s and is removed", observer, hook)
                self.remove(observer)
