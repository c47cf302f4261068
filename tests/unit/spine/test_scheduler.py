"""Scheduler: what it sends, tells and counts; errors stay, and closing always ends it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from plans import planned
from scheduler_bench import WAIT_S, Bench, Build, FakeTransport, alive, benches

from bytesched.core import SchedulerCore
from bytesched.errors import InvalidTransition, SchedulerClosed, TransportError
from bytesched.order import Following, Leading
from bytesched.policy import Priority
from bytesched.scheduler import Done, Scheduler
from bytesched.task import CommTask, TaskState


@pytest.fixture
def build() -> Iterator[Build]:
    with benches() as build:
        yield build


@pytest.fixture
def bench(build: Build) -> Bench:
    return build()


def test_tasks_are_announced_together_and_before_they_start(build: Build) -> None:
    bench = build(credit_bytes=30)
    tasks = planned([10, 10, 10, 30])
    bench.ready(tasks[3], *tasks[:3], started=1)
    bench.settle()
    bench.transport.finish_next()
    bench.transport.wait_for(4)
    assert bench.announced == [[3], [0, 1, 2]]


def test_what_is_ready_starts_in_the_order_that_was_given(build: Build) -> None:
    bench = build(credit_bytes=100, queue=Following())
    a, b, c = planned([10] * 3)
    bench.ready(a, b)
    bench.scheduler.ordered([2, 0])
    bench.settle()
    assert bench.transport.started == [], "2 comes first and is not ready here"
    bench.ready(c, started=2)
    bench.scheduler.ordered([1])
    bench.transport.wait_for(3)
    assert bench.transport.started == [c, a, b]


def test_the_first_error_stays_and_nothing_is_started_after_it(build: Build) -> None:
    bench = build(credit_bytes=20)
    a, b, c = planned([10] * 3)
    bench.ready(a, b, c, started=2)
    first, second = TransportError("first"), TransportError("second")
    bench.transport.fail(a, first)
    bench.transport.fail(b, second)
    bench.settle()
    assert bench.errors == [first]
    assert bench.scheduler.error is first
    assert bench.transport.started == [a, b], "c was ready, and its turn had come"
    assert (a.state, b.state) == (TaskState.FAILED, TaskState.FAILED)


class Refusing(FakeTransport):
    """Raises in start, for one task."""

    def __init__(self, refused: str) -> None:
        super().__init__()
        self.refused = refused

    def start(self, task: CommTask, done: Done) -> None:
        if task.name == self.refused:
            raise ConnectionResetError("refused")
        super().start(task, done)


def test_a_start_that_raises_fails_its_task_and_ends_the_batch(build: Build) -> None:
    bench = build(credit_bytes=30, transport=Refusing("t1"))
    a, b, c, d = planned([10, 10, 10, 30])
    bench.ready(d, a, b, c, started=1)
    bench.settle()
    bench.transport.finish_next()
    assert bench.failed.wait(WAIT_S)
    bench.settle()
    assert isinstance(bench.scheduler.error, ConnectionResetError)
    assert bench.transport.started == [d, a]
    assert b.state is TaskState.FAILED
    assert "fail" in bench.scheduler.core.story(b)


@pytest.mark.parametrize("hook", ["announce", "on_finish"])
def test_a_callback_that_raises_is_the_error(
    build: Build, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError(hook)

    def raising(self: Bench, *args: Any) -> None:
        raise error

    monkeypatch.setattr(Bench, hook, raising)
    bench = build()
    bench.ready(*planned([10]))
    if hook == "on_finish":
        bench.transport.wait_for(1)
        bench.transport.finish_next()
    assert bench.failed.wait(WAIT_S)
    assert bench.errors == [error]


def test_an_on_error_that_raises_is_logged_and_the_thread_lives_on(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raising(self: Bench, error: BaseException) -> None:
        raise RuntimeError("on_error's own trouble")

    monkeypatch.setattr(Bench, "on_error", raising)
    bench = build(credit_bytes=20)
    task, other = planned([10] * 2)
    bench.ready(task, other, started=2)
    error = TransportError("cut")
    bench.transport.fail(other, error)
    bench.transport.finish(task)
    assert bench.finished.get(timeout=WAIT_S)[0] is task
    assert bench.scheduler.error is error
    assert "cut" in caplog.text


def test_a_transport_that_calls_done_twice_is_found_out(bench: Bench) -> None:
    (task,) = planned([10])
    bench.ready(task, started=1)
    done = bench.transport._in_flight[task]
    done(task, None)
    done(task, None)
    assert bench.failed.wait(WAIT_S)
    assert isinstance(bench.scheduler.error, InvalidTransition)
    assert "t0" in str(bench.scheduler.error)


def test_close_deals_first_with_what_was_told_before(build: Build) -> None:
    bench = build(credit_bytes=100)
    tasks = planned([10] * 5)
    bench.ready(*tasks)
    bench.scheduler.close()
    assert bench.transport.started == tasks


@pytest.mark.parametrize("hook", ["on_finish", "on_error"])
def test_close_where_events_are_handled_ends_it(hook: str) -> None:
    before = alive()
    closed = threading.Event()

    def close(_: object) -> None:
        scheduler.close()
        closed.set()

    transport = FakeTransport()
    calls: dict[str, Any] = {hook: close}
    scheduler = Scheduler(SchedulerCore(Leading(Priority()), credit_bytes=1), transport, **calls)
    (task,) = planned([10])
    task.notify_ready()
    scheduler.notify_ready(task)
    transport.wait_for(1)
    if hook == "on_finish":
        transport.finish(task)
    else:
        transport.fail(task, TransportError("cut"))
    assert closed.wait(WAIT_S)
    for thread in alive() - before:
        thread.join(WAIT_S)
        assert not thread.is_alive()


class Stuck(FakeTransport):
    """Its start returns only when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def start(self, task: CommTask, done: Done) -> None:
        super().start(task, done)
        self.released.wait(WAIT_S)
        raise SchedulerClosed("closed while it was starting")

    def close(self) -> None:
        self.released.set()
        super().close()


def test_close_frees_a_thread_that_is_stuck_in_start(build: Build) -> None:
    before = alive()
    bench = build(transport=Stuck())
    telling = threading.Thread(target=bench.ready, args=planned([10]))
    telling.start()
    bench.transport.wait_for(1)
    bench.scheduler.close(timeout_s=0.5)
    telling.join(WAIT_S)
    assert not telling.is_alive()
    assert alive() == before
    assert bench.errors == [], "that it was closed is no error"
