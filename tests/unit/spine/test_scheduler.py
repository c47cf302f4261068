"""Scheduler: what it sends, tells and counts; errors stay, and closing always ends it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_transport import FakeTransport
from plans import planned
from scheduler_bench import WAIT_S, Bench, Build, alive, benches

from bytesched.core import SchedulerCore
from bytesched.errors import InvalidTransition, SchedulerClosed, TransportError
from bytesched.observe import Observer, Observers
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


def test_ready_tasks_are_sent_by_priority_and_finish_rearmed(bench: Bench) -> None:
    a, b, c = planned([10] * 3)
    bench.ready(c)
    bench.transport.wait_for(1)
    bench.ready(b, a)
    for started in (2, 3):
        bench.settle()
        bench.transport.finish_next()
        bench.transport.wait_for(started)
    bench.transport.finish_next()
    finished = [bench.finished.get(timeout=WAIT_S) for _ in range(3)]
    assert finished == [(task, TaskState.WAITING) for task in (c, a, b)]
    assert bench.transport.started == [c, a, b]
    assert bench.errors == []


def test_tasks_go_round_in_every_iteration(bench: Bench) -> None:
    tasks = planned([10] * 4)
    for iteration in range(1, 4):
        bench.ready(*tasks)
        for sent in range(4):
            bench.transport.wait_for(4 * (iteration - 1) + sent + 1)
            bench.transport.finish_next()
        assert {bench.finished.get(timeout=WAIT_S)[0] for _ in range(4)} == set(tasks)
    bench.settle()
    assert bench.scheduler.core.idle
    assert bench.scheduler.tasks_started == 12


def test_tasks_are_announced_together_and_before_they_start(build: Build) -> None:
    bench = build(credit_bytes=30)
    tasks = planned([10, 10, 10, 30])
    bench.ready(tasks[3], *tasks[:3])
    bench.transport.wait_for(1)
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
    bench.ready(c)
    bench.transport.wait_for(2)
    bench.scheduler.ordered([1])
    bench.transport.wait_for(3)
    assert bench.transport.started == [c, a, b]


class Recorder(Observer):
    def __init__(self) -> None:
        self.spans: list[tuple[str, str, int, int, dict[str, Any] | None]] = []

    def on_span(
        self, track: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None
    ) -> None:
        self.spans.append((track, name, start_ns, end_ns, args))


class Raising(Observer):
    def on_span(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("an observer's own trouble")


def send_all(bench: Bench, tasks: list[CommTask]) -> None:
    bench.ready(*tasks)
    for count in range(1, len(tasks) + 1):
        bench.transport.wait_for(count)
        bench.transport.finish_next()
    for _ in tasks:
        bench.finished.get(timeout=WAIT_S)
    bench.settle()
    bench.scheduler.close()


def test_observers_see_queue_and_send_of_every_task(build: Build) -> None:
    recorder = Recorder()
    send_all(build(observers=Observers([recorder])), planned([10] * 3))
    for track in ("queue", "send"):
        seen = [span for span in recorder.spans if span[0] == track]
        assert sorted(name for _, name, *_ in seen) == ["t0", "t1", "t2"]
        assert all(start_ns <= end_ns for _, _, start_ns, end_ns, _ in seen)
        assert all(args is not None and "chunk" in args for *_, args in seen)
    sends = [(start, end) for track, _, start, end, _ in recorder.spans if track == "send"]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(sends))


def test_an_observer_that_raises_is_removed_and_harms_nothing(build: Build) -> None:
    recorder = Recorder()
    observers = Observers([Raising(), recorder])
    bench = build(observers=observers)
    send_all(bench, planned([10] * 3))
    assert bench.errors == []
    assert len(recorder.spans) == 6
    assert len(observers._observers) == 1


def test_figures_add_up(build: Build) -> None:
    bench = build(credit_bytes=100)
    send_all(bench, planned([10] * 5))
    scheduler = bench.scheduler
    assert scheduler.tasks_started == 5
    assert scheduler.cpu_ns > 0
    assert scheduler.busy_ns > 0


def test_repr_tells_its_state(build: Build) -> None:
    bench = build()
    assert "running" in repr(bench.scheduler)
    (task,) = planned([10] * 1)
    bench.ready(task)
    bench.transport.wait_for(1)
    bench.transport.fail(task, TransportError("stop"))
    assert bench.failed.wait(WAIT_S)
    assert "failed" in repr(bench.scheduler)


def test_the_first_error_stays_and_nothing_is_started_after_it(build: Build) -> None:
    bench = build(credit_bytes=20)
    a, b, c = planned([10] * 3)
    bench.ready(a, b, c)
    bench.transport.wait_for(2)
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
    bench.ready(d, a, b, c)
    bench.transport.wait_for(1)
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
    bench.ready(*planned([10] * 1))
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
    bench.ready(task, other)
    bench.transport.wait_for(2)
    error = TransportError("cut")
    bench.transport.fail(other, error)
    bench.transport.finish(task)
    assert bench.finished.get(timeout=WAIT_S)[0] is task
    assert bench.scheduler.error is error
    assert "cut" in caplog.text


def test_a_transport_that_calls_done_twice_is_found_out(bench: Bench) -> None:
    (task,) = planned([10] * 1)
    bench.ready(task)
    bench.transport.wait_for(1)
    done = bench.transport._in_flight[task]
    done(task, None)
    done(task, None)
    assert bench.failed.wait(WAIT_S)
    assert isinstance(bench.scheduler.error, InvalidTransition)
    assert "t0" in str(bench.scheduler.error)


def test_close_is_idempotent_and_leaves_no_thread(build: Build) -> None:
    before = alive()
    bench = build()
    bench.ready(*planned([10] * 2))
    bench.transport.wait_for(1)
    bench.scheduler.close()
    bench.scheduler.close()
    assert alive() == before
    assert bench.transport.closed
    assert bench.transport.in_flight == ()


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
    core = SchedulerCore(Leading(Priority()), credit_bytes=1)
    if hook == "on_finish":
        scheduler = Scheduler(core, transport, on_finish=close)
    else:
        scheduler = Scheduler(core, transport, on_error=close)
    (task,) = planned([10] * 1)
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
    telling = threading.Thread(target=bench.ready, args=planned([10] * 1))
    telling.start()
    bench.transport.wait_for(1)
    bench.scheduler.close(timeout_s=0.5)
    telling.join(WAIT_S)
    assert not telling.is_alive()
    assert alive() == before
    assert bench.errors == [], "that it was closed is no error"


def test_many_schedulers_leave_no_thread(build: Build) -> None:
    before = alive()
    for _ in range(20):
        build().scheduler.close()
    assert alive() == before
