"""What ends with a process, whichever way that comes, or with an object that is gone."""

from __future__ import annotations

import _thread
import atexit
import logging
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any, Final, NoReturn

#: the name of what ends the process, in `sys`
_FAILURE: Final = "bytesched_failure"

#: of `at_exit`, the oldest first: in which process it was asked for
_calls: dict[Callable[[], None], int] = {}
#: of `at_exit`, in children of multiprocessing
_finalizers: dict[Callable[[], None], Finalize] = {}


def at_exit(call: Callable[[], None]) -> None:
    """Calls ``call`` as this process ends, before all that was asked for earlier.

    Once for each time it is asked for anew, if at all: ``call`` may be called twice.
    """
    not_at_exit(call)
    atexit.register(call)
    _calls[call] = os.getpid()
    os._exit = _exit
    if multiprocessing.parent_process() is not None:
        # Most children of multiprocessing end without the functions of atexit.
        _finalizers[call] = Finalize(None, call, exitpriority=1000)


def not_at_exit(call: Callable[[], None]) -> None:
    """Undoes `at_exit`; nothing if it was not asked for."""
    atexit.unregister(call)
    _calls.pop(call, None)
    if (finalizer := _finalizers.pop(call, None)) is not None:
        finalizer.cancel()


_exit_now: Final = os._exit
#: the process ends by `_exit`, whatever exception is being handled
_leaving: Final[list[int]] = []


def _exit(status: int) -> NoReturn:
    """Ends the process without what Python does at its end; a success includes the last step.

    Not in a forked child, nor from a thread beside the script's: these end no training.
    """
    calls = [call for call, process in reversed(list(_calls.items())) if process == os.getpid()]
    if status or not calls or threading.current_thread() is not threading.main_thread():
        _exit_now(status)
    try:
        _leaving.append(status)
        for call in calls:
            call()
        status = int(_FAILURE in vars(sys))
    except BaseException:  # noqa: BLE001 - it is shown, and nothing goes on
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        _exit_now(status)


def died_of() -> BaseException | None:
    """The uncaught exception that ends this process, if one does."""
    if _leaving:
        return None
    died: BaseException | None = getattr(sys, "last_value", None)
    if died is None and not isinstance(sys.exc_info()[1], SystemExit):
        # multiprocessing runs its finalizers while the exception passes.
        died = sys.exc_info()[1]
    return died


def make_exit_fail() -> None:
    """This process, which is ending, ends with exit code 1, after all else was done."""
    if multiprocessing.parent_process() is not None:
        Finalize(None, os._exit, (1,), exitpriority=-1_000_000)
    # What other modules hold may be kept alive by extensions, and never be deleted. One alone: the
    # end of another one would end the process now.
    if _FAILURE not in vars(sys):
        vars(sys)[_FAILURE] = _Failure()


class _Failure:
    """Ends the process when the interpreter takes `sys` apart, after all else was done."""

    def __del__(self, exit_now: Callable[[int], None] = _exit_now) -> None:
        exit_now(1)


log = logging.getLogger("bytesched")

_LOOKS_EVERY_S = 0.005

#: how long the process waits, at its end, for what may block for ever
_LAST_WAIT_S = 5.0

#: nothing is done any more but what has begun
_at_the_end = threading.Event()

#: those that have not ended yet, and whether each has deadlines of its own
_under_way: dict[object, bool] = {}
# A child has none of the threads that end something.
os.register_at_fork(after_in_child=_under_way.clear)
os.register_at_fork(after_in_child=_at_the_end.clear)


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
    _at_the_end.set()
    wait_for_ends()
    deadline_s = time.monotonic() + _LAST_WAIT_S
    while _under_way:
        if time.monotonic() > deadline_s:
            log.error("%d parts have not ended after %g s", len(_under_way), _LAST_WAIT_S)
            return
        time.sleep(_LOOKS_EVERY_S)


def is_at_the_end() -> bool:
    """Whether the process ends, and only waits for what has begun."""
    return _at_the_end.is_set() or not threading.main_thread().is_alive()


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
