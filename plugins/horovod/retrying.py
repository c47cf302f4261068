"""A call that is tried again and again in the background, for as long as its process trains."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

__all__ = ["retry_in_background"]


def retry_in_background(
    attempt: Callable[[], bool], *, name: str, nap_s: float, timeout_s: float
) -> None:
    """Calls ``attempt`` in a thread called ``name`` until it returns True.

    It ends after ``timeout_s``, and with the process: no thread is left when those functions of
    `atexit` run that were registered earlier. In a process that is ending already, ``attempt`` is
    not called at all.
    """
    lock = threading.Lock()
    is_exiting = threading.Event()

    def run() -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_exiting.wait(nap_s) and time.monotonic() < deadline_s:
            if attempt():
                break
        if not is_exiting.is_set():
            atexit.unregister(stop)

    def stop() -> None:
        with lock:
            is_exiting.set()
        if thread.ident is not None:
            thread.join(timeout_s)

    thread = threading.Thread(target=run, name=name, daemon=True)
    # What is registered while the functions of atexit run is never called. So it is registered
    # first, and the main thread, which ends before they run, is looked at afterwards.
    atexit.register(stop)
    with lock:
        if threading.main_thread().is_alive() and not is_exiting.is_set():
            thread.start()
