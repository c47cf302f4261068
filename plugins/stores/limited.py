"""A call that may wait for ever, for other ranks or servers, with a limit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def limited(call: Callable[[], T], timeout_s: float, late: Callable[[], Exception]) -> T:
    """What ``call`` returns or raises; after ``timeout_s``, raises ``late()``."""
    ended: Future[T] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            ended.set_exception(error)

    # A thread of its own: what waits there is never woken, and ends with the process.
    Thread(target=run, name="bytesched-waits", daemon=True).start()
    try:
        return ended.result(timeout_s)
    except TooLate:
        if ended.done():
            # In between; or it has raised the same.
            return ended.result()
        raise late() from None
