"""Scheduler: the thread around the core, what it sends, tells and counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from plans import planned
from scheduler_bench import WAIT_S, Bench, Build, benches

from bytesched.observe import Observer, Observers
from bytesched.order import Following
from bytesched.scheduler import EventThread, InTurn
from bytesched.task import CommTask, TaskState


@pytest.fixture(params=[EventThread, InTurn])
def build(request: pytest.FixtureRequest) -> Iterator[Build]:
    with benches(request.param) as build:
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
    assert bench.scheduler.bytes_started == 120


def test_tasks_are_announced_together_and_before_they_start(build: Build) -> None:
    bench = build(credit_bytes=30)
    tasks = planned([10] * 4)
    bench.ready(tasks[0])
    bench.transport.wait_for(1)
    bench.ready(*tasks[1:])
    bench.transport.wait_for(3)
    bench.settle()
    assert bench.announced == [[0], [1], [2]]
    bench.scheduler.set_credit(1000)
    bench.transport.wait_for(4)
    assert bench.announced == [[0], [1], [2], [3]]


def test_a_batch_is_one_announcement(build: Build) -> None:
    bench = build(credit_bytes=10)
    tasks = planned([10] * 4)
    bench.ready(tasks[3], *tasks[:3])
    bench.transport.wait_for(1)
    bench.settle()
    bench.scheduler.set_credit(1000)
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


def test_the_queue_is_swapped_between_iterations(bench: Bench) -> None:
    (task,) = planned([10] * 1)
    bench.scheduler.use_queue(Following())
    bench.ready(task)
    bench.settle()
    assert bench.transport.started == []
    bench.scheduler.ordered([0])
    bench.transport.wait_for(1)
    assert bench.errors == []


class Recorder(Observer):
    def __init__(self) -> None:
        self.spans: list[tuple[str, str, int, int, dict[str, Any] | None]] = []

    def on_span(
        self,
        track: str,
        name: str,
        start_ns: int,
        end_ns: int,
        args: dict[str, Any] | None = None,
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
    assert scheduler.bytes_started == 50
    assert scheduler.cpu_ns > 0
    assert scheduler.busy_ns > 0


def test_repr_tells_its_state(build: Build) -> None:
    bench = build()
    assert "running" in repr(bench.scheduler)
    bench.scheduler.fail(RuntimeError("stop"))
    assert bench.failed.wait(WAIT_S)
    assert "failed" in repr(bench.scheduler)
