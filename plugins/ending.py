"""The end of a process, whichever way it comes, and that it does not look like a success."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Final, NoReturn

__all__ = ["at_exit", "died_of", "make_exit_fail", "not_at_exit"]

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
