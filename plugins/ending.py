"""The end of a process, whichever way it comes, and that it does not look like a success."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Final

__all__ = ["at_exit", "died_of", "make_exit_fail", "not_at_exit"]

#: the name of what ends the process, in `sys`
_FAILURE: Final = "bytesched_failure"

#: of `at_exit`, in children of multiprocessing
_finalizers: dict[Callable[[], None], Finalize] = {}


def at_exit(call: Callable[[], None]) -> None:
    """Calls ``call`` as this process ends, before all that was asked for earlier.

    Once for each time it is asked for anew, if at all: ``call`` may be called twice.
    """
    not_at_exit(call)
    atexit.register(call)
    if multiprocessing.parent_process() is not None:
        # Most children of multiprocessing end without the functions of atexit.
        _finalizers[call] = Finalize(None, call, exitpriority=1000)


def not_at_exit(call: Callable[[], None]) -> None:
    """Undoes `at_exit`; nothing if it was not asked for."""
    atexit.unregister(call)
    if (finalizer := _finalizers.pop(call, None)) is not None:
        finalizer.cancel()


def died_of() -> BaseException | None:
    """The uncaught exception that ends this process, if one does."""
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

    def __del__(self, exit_now: Callable[[int], None] = os._exit) -> None:
        exit_now(1)
