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
    main = threading.main_thread()

    def run() -> None:
        deadline_s = time.monotonic() + timeout_s
        # The main thread ends before the functions of atexit run.
        while main.is_alive() and time.monotonic() < deadline_s and not attempt():
            time.sleep(nap_s)
        atexit.unregister(join)

    def join() -> None:
        if thread.ident is not None:
            thread.join(timeout_s)

    thread = threading.Thread(target=run, name=name, daemon=True)
    # What is registered while they run is never called: so first, and then the thread is looked at.
    atexit.register(join)
    if main.is_alive():
        thread.start()
