"""What ends with an object that nothing refers to any more, and before the process does."""

from __future__ import annotations

import _thread
import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["end_beside", "end_when_gone", "wait_for_ends"]

_LOOKS_EVERY_S = 0.005

#: those that have not ended yet
_under_way: dict[object, None] = {}


def end_when_gone(subject: object, end: Callable[[], None]) -> weakref.finalize[..., Any]:
    """Calls ``end``, as `end_beside` does, when nothing refers to ``subject`` any more.

    Not at the end of the process, which waits for ends that have begun.
    """
    finalizer = weakref.finalize(subject, end_beside, end)
    finalizer.atexit = False
    # Anew each time: before that of what the end has need of.
    atexit.unregister(wait_for_ends)
    atexit.register(wait_for_ends)
    return finalizer


def end_beside(end: Callable[[], None]) -> None:
    """Calls ``end``, which has deadlines and raises nothing. Any thread, between any two lines."""
    # Not in this thread, which may be one that the end has to wait for; and not by way of
    # Thread.start(), which takes locks that the collector may have come between.
    token = object()
    _under_way[token] = None
    _thread.start_new_thread(_start, (token, end))


def wait_for_ends() -> None:
    """Returns when all that have begun are over."""
    while _under_way:
        time.sleep(_LOOKS_EVERY_S)


def _start(token: object, end: Callable[[], None]) -> None:
    threading.Thread(target=_run, args=(token, end), name="bytesched-ending", daemon=True).start()


def _run(token: object, end: Callable[[], None]) -> None:
    try:
        end()
    finally:
        del _under_way[token]
