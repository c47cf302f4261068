"""A transport that ends tasks when a test says so."""

from __future__ import annotations

import threading

from bytesched.errors import SchedulerClosed
from bytesched.scheduler import Done
from bytesched.task import CommTask


class FakeTransport:
    """Sends nothing, remembers what was started, and finishes a task when the test asks for it."""

    def __init__(self) -> None:
        #: every task ever started, in that order
        self.started: list[CommTask] = []
        self.closed = False
        self._in_flight: dict[CommTask, Done] = {}
        self._changed = threading.Condition()

    @property
    def in_flight(self) -> tuple[CommTask, ...]:
        """Started and not ended, oldest first."""
        with self._changed:
            return tuple(self._in_flight)

    def start(self, task: CommTask, done: Done) -> None:
        """Keeps ``done`` until the test ends the task."""
        with self._changed:
            if self.closed:
                raise SchedulerClosed(f"{task!r} was started on a closed transport")
            if task in self._in_flight:
                raise ValueError(f"{task!r} is in flight already")
            self.started.append(task)
            self._in_flight[task] = done
            self._changed.notify_all()

    def wait_for(self, started: int, timeout_s: float = 10.0) -> None:
        """Waits until ``started`` tasks have been started in all; TimeoutError if they are not."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.started) >= started, timeout_s):
                raise TimeoutError(f"{len(self.started)} of {started} tasks were started")

    def finish(self, task: CommTask) -> None:
        """``task``, which is in flight, has been sent."""
        self._end(task, None)

    def finish_next(self) -> CommTask:
        """The oldest task in flight has been sent; returns it."""
        if not (in_flight := self.in_flight):
            raise ValueError("nothing is in flight")
        self._end(in_flight[0], None)
        return in_flight[0]

    def finish_all(self) -> None:
        """All that is in flight now has been sent."""
        for task in self.in_flight:
            self._end(task, None)

    def fail(self, task: CommTask, error: BaseException) -> None:
        """``task``, which is in flight, ended with ``error``."""
        self._end(task, error)

    def close(self) -> None:
        """Tasks in flight fail with SchedulerClosed."""
        with self._changed:
            self.closed = True
        for task in self.in_flight:
            self._end(task, SchedulerClosed(f"{task!r} was in flight on close"))

    def _end(self, task: CommTask, error: BaseException | None) -> None:
        with self._changed:
            done = self._in_flight.pop(task, None)
        if done is None:
            raise ValueError(f"{task!r} is not in flight")
        done(task, error)
