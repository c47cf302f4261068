"""A Scheduler over a FakeTransport, with all that it tells written down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from fake_transport import FakeTransport

from bytesched.core import SchedulerCore
from bytesched.observe import Observers
from bytesched.order import Leading, ReadyQueue
from bytesched.policy import Priority
from bytesched.scheduler import Events, Scheduler
from bytesched.task import CommTask, TaskState

WAIT_S = 10.0


class Bench:
    """A scheduler with everything that it tells, over a FakeTransport."""

    def __init__(
        self,
        *,
        credit_bytes: int = 1,
        queue: ReadyQueue | None = None,
        observers: Observers | None = None,
        transport: FakeTransport | None = None,
        events: Events | None = None,
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
            observers=observers,
            events=events,
        )

    def announce(self, tasks: Sequence[CommTask]) -> None:
        assert not set(tasks) & set(self.transport.in_flight), "told after the start"
        self.announced.append([task.index for task in tasks])

    def on_finish(self, task: CommTask) -> None:
        self.finished.put((task, task.state))

    def on_error(self, error: BaseException) -> None:
        self.errors.append(error)
        self.failed.set()

    def ready(self, *tasks: CommTask) -> None:
        for task in tasks:
            assert task.notify_ready()
            self.scheduler.notify_ready(task)

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
def benches(events: Callable[[], Events]) -> Iterator[Build]:
    """Builds benches that are closed, and have no thread left, after the test."""
    before = alive()
    built: list[Bench] = []

    def build(**parts: Any) -> Bench:
        built.append(Bench(events=events(), **parts))
        return built[-1]

    yield build
    for bench in built:
        bench.scheduler.close()
    assert alive() == before


def alive() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "bytesched" in thread.name}
