"""A thread that waits for messages, those of one task after those of the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

from .messages import Messages

__all__ = ["Waiter"]


class _Begun(NamedTuple):
    name: str
    #: sends and receives, each with its peer
    works: Sequence[tuple[Any, int]]
    done: Callable[[], None]


class Waiter:
    """Waits for what was begun, and reports the end of each task.

    Args:
        name: of the thread.
        fail: called there with an error, unless the thread is to end.
    """

    def __init__(
        self, messages: Messages, name: str, fail: Callable[[BaseException], None]
    ) -> None:
        self._messages = messages
        self._fail = fail
        self._begun: SimpleQueue[_Begun | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._under_way = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether it waits for a message."""
        return bool(self._under_way)

    def put(self, name: str, works: Sequence[tuple[Any, int]], done: Callable[[], None]) -> None:
        """Calls ``done`` when ``works`` of a task have come, after those of earlier tasks."""
        with self._lock:
            self._under_way += 1
        self._begun.put(_Begun(name, works, done))

    def stop(self) -> None:
        """Ends the thread when nothing is under way; what fails from now on was closed."""
        self._closed = True
        self._begun.put(None)

    def join(self) -> None:
        """Returns when the thread has ended, or after a few seconds."""
        self._thread.join(5.0)

    def _run(self) -> None:
        while (begun := self._begun.get()) is not None:
            try:
                try:
                    for work, peer in begun.works:
                        self._messages.wait(work, peer, task=begun.name)
                finally:
                    with self._lock:
                        self._under_way -= 1
                begun.done()
            except BaseException as error:  # noqa: BLE001 - others wait for what does not come
                if not self._closed:
                    self._fail(error)
            # Their memory is not to wait for the next task.
            begun = work = None
