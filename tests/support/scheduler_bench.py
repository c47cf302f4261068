"""A Scheduler over a transport that ends tasks when a test says so; all that it tells is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from bytesched.core import SchedulerCore
from bytesched.errors import SchedulerClosed
from bytesched.order import Leading, ReadyQueue
from bytesched.policy import Priority
from bytesched.scheduler import Done, Scheduler
from bytesched.task import CommTask, TaskState

WAIT_S = 10.0


class FakeTransport:
    """Sends nothing, remembers what was started, and ends a task when the test asks for it."""

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
        with self._changed:
            if self.closed:
                raise SchedulerClosed(f"{task!r} was started on a closed transport")
            assert task not in self._in_flight
            self.started.append(task)
            self._in_flight[task] = done
            self._changed.notify_all()

    def wait_for(self, started: int) -> None:
        """Waits until ``started`` tasks have been started in all."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.started) >= started, WAIT_S)

    def finish(self, task: CommTask) -> None:
        self._in_flight.pop(task)(task, None)

    def finish_next(self) -> None:
        self.finish(self.in_flight[0])

    def fail(self, task: CommTask, error: BaseException) -> None:
        self._in_flight.pop(task)(task, error)

    def close(self) -> None:
        with self._changed:
            self.closed = True
        for task in self.in_flight:
            self.fail(task, SchedulerClosed(f"{task!r} was in flight on close"))


class Bench:
    """A scheduler with everything that it tells, over a FakeTransport."""

    def __init__(
        self,
        *,
        credit_bytes: int = 1,
        queue: ReadyQueue | None = None,
        transport: FakeTransport | None = None,
    ) -> None:
        self.transport = transport or FakeTransport()
        self.announced: list[list[int]] = []
        self.finished: SimpleQueue[tuple[CommTask, TaskState]] = SimpleQueue()
        self.errors: list[BaseException] = []
        self.failed = threading.Event()
        self.scheduler = Scheduler(
            SchedulerCore(
                Leading(Priority()) if queue is None else queue, credit_bytes=credit_bytes
            ),
            self.transport,
            announce=self.announce,
            on_finish=self.on_finish,
            on_error=self.on_error,
        )

    def announce(self, tasks: Sequence[CommTask]) -> None:
        assert not set(tasks) & set(self.transport.in_flight), "told after the start"
        self.announced.append([task.index for task in tasks])

    def on_finish(self, task: CommTask) -> None:
        self.finished.put((task, task.state))

    def on_error(self, error: BaseException) -> None:
        self.errors.append(error)
        self.failed.set()

    def ready(self, *tasks: CommTask, started: int = 0) -> None:
        """Returns when so many tasks have been started in all."""
        for task in tasks:
            assert task.notify_ready()
            self.scheduler.notify_ready(task)
        self.transport.wait_for(started)

    def settle(self) -> None:
        """Returns when all that was told so far has been dealt with."""
        dealt_with = threading.Event()

        def mark() -> Sequence[CommTask]:
            dealt_with.set()
            return ()

        self.scheduler._put(mark)
        assert dealt_with.wait(WAIT_S)


Build = Callable[..., Bench]


@contextmanager
def benches() -> Iterator[Build]:
    """Builds benches that are closed, and have no thread left, after the test."""
    before = alive()
    built: list[Bench] = []

    def build(**parts: Any) -> Bench:
        built.append(Bench(**parts))
        return built[-1]

    yield build
    for bench in built:
        bench.scheduler.close()
    assert alive() == before


def alive() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "bytesched" in thread.name}
