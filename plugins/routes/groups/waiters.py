"""Waiting for messages to many ranks with few threads; a stuck one holds up its own lane alone."""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic
from typing import Any, Final, NamedTuple

from bytesched.errors import BytesschedError, SchedulerClosed, TransportError
from bytesched.task import CommTask
from bytesched.transport import Done

from .group import PATIENCE_S
from .messages import Messages

__all__ = ["Waiters"]

#: after which what others wait for is stuck, as far as who waits next can tell
_STUCK_S: Final = 0.2
#: one that waits, and the spare one
_THREADS: Final = 2


class _Begun(NamedTuple):
    task: CommTask
    work: Any
    peer: int
    done: Done
    at_s: float


class Waiters:
    """Waits for the ends of messages, lane by lane in the order in which they were begun.

    Gloo cannot be asked whether a message has left: a thread has to wait for it. One thread waits
    for one lane after the other. A spare one stands by, and takes the next lane when that has been
    left alone for too long, as it is where a rank does not take what it is sent. So there are two
    threads, and one more for each rank that is stuck, for as long as it is.

    Args:
        name: of the threads.
    """

    def __init__(self, messages: Messages, name: str) -> None:
        self._messages = messages
        self._name = name
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: by lane, messages that were begun; lanes that no thread waits for, the oldest first
        self._begun: dict[int, deque[_Begun]] = {}
        self._unattended: deque[int] = deque()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._idle = 0
        for _ in range(_THREADS):
            self._begin_thread()

    def put(self, task: CommTask, work: Any, peer: int, done: Done) -> None:
        """Calls ``done`` when ``work``, a message to ``peer``, has ended."""
        with self._lock:
            begun = self._begun.setdefault(task.lane, deque())
            begun.append(_Begun(task, work, peer, done, monotonic()))
            if len(begun) == 1:
                self._unattended.append(task.lane)
                self._changed.notify()

    def stop(self) -> None:
        """Ends the threads when their waits are over; what fails from now on was closed."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """Returns when the threads have ended, or after a few seconds."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(PATIENCE_S)

    def _begin_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _run(self) -> None:
        while (lane := self._next()) is not None:
            begun = self._begun[lane][0]
            failed: BytesschedError | None = None
            try:
                self._messages.wait(begun.work, begun.peer, task=begun.task.name)
            except TransportError as error:
                failed = (
                    SchedulerClosed(f"closed while {begun.task.name} was being sent")
                    if self._closed
                    else error
                )
            with self._lock:
                self._begun[lane].popleft()
                if self._begun[lane]:
                    self._unattended.append(lane)
            begun.done(begun.task, failed)

    def _next(self) -> int | None:
        """A lane to wait for; None when there will be none."""
        with self._lock:
            self._idle += 1
            try:
                while not self._closed:
                    if not self._unattended:
                        if self._idle > _THREADS:
                            return None
                        self._changed.wait()
                        continue
                    # The last idle thread is the spare one.
                    since_s = self._begun[self._unattended[0]][0].at_s
                    left_s = 0.0 if self._idle > 1 else since_s + _STUCK_S - monotonic()
                    if left_s <= 0:
                        if self._idle == 1:
                            self._begin_thread()
                        return self._unattended.popleft()
                    self._changed.wait(left_s)
                return None
            finally:
                self._idle -= 1

    def __repr__(self) -> str:
        lanes = sum(map(bool, self._begun.values()))
        threads = sum(thread.is_alive() for thread in self._threads)
        return f"<Waiters {threads} threads, messages in {lanes} lanes>"
