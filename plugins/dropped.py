"""What ends with an object that nothing refers to any more, and before the process does."""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["end_beside", "end_soon", "end_when_gone", "wait_for_ends", "wait_for_last"]

log = logging.getLogger("bytesched")

_LOOKS_EVERY_S = 0.005

#: how long the process waits, at its end, for what may block for ever
_LAST_WAIT_S = 5.0

#: those that have not ended yet, and whether each has deadlines of its own
_under_way: dict[object, bool] = {}
# A child has none of the threads that end something.
os.register_at_fork(after_in_child=_under_way.clear)


def end_when_gone(subject: object, end: Callable[[], None]) -> weakref.finalize[..., Any]:
    """Calls ``end``, as `end_beside` does, when nothing refers to ``subject`` any more.

    Not at the end of the process, which waits for ends that have begun.
    """
    finalizer = weakref.finalize(subject, end_beside, end)
    finalizer.atexit = False
    _wait_at_exit()
    return finalizer


def end_beside(end: Callable[[], None]) -> None:
    """Calls ``end``, which has deadlines and raises nothing. Any thread, between any two lines."""
    # Not in this thread, which may be one that the end has to wait for; and not by way of
    # Thread.start(), which takes locks that the collector may have come between.
    token = object()
    _under_way[token] = True
    _thread.start_new_thread(_started, (token, [end]))


def end_soon(end: Callable[[], None], patience_s: float) -> None:
    """Calls ``end`` in a thread of its own, and waits so long for it; at its end the process waits.

    For what may block in C++: an interpreter that is gone when it comes back aborts the process.
    """
    token = object()
    _under_way[token] = False
    _wait_at_exit()
    _started(token, [end]).join(patience_s)


def wait_for_ends() -> None:
    """Returns when all that have deadlines are over: what they apply is not to be lost."""
    while any(list(_under_way.values())):
        time.sleep(_LOOKS_EVERY_S)


def wait_for_last() -> None:
    """Returns when all are over, or when only what may block for ever is left after a while."""
    wait_for_ends()
    deadline_s = time.monotonic() + _LAST_WAIT_S
    while _under_way:
        if time.monotonic() > deadline_s:
            log.error("%d connections are not closed after %g s", len(_under_way), _LAST_WAIT_S)
            return
        time.sleep(_LOOKS_EVERY_S)


def _wait_at_exit() -> None:
    # Anew each time: before that of what the end has need of.
    atexit.unregister(wait_for_last)
    atexit.register(wait_for_last)


def _started(token: object, held: list[Callable[[], None]]) -> threading.Thread:
    thread = threading.Thread(target=_run, args=(token, held), name="bytesched-ending", daemon=True)
    thread.start()
    return thread


def _run(token: object, held: list[Callable[[], None]]) -> None:
    try:
        # What this was the last to refer to is gone as well when it counts as over.
        held.pop()()
    finally:
        del _under_way[token]
