"""SchedulerCore: what it starts after whatever happens, what it refuses, its story and its work."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plans import planned, ready

from bytesched.core import SchedulerCore
from bytesched.errors import InvalidTransition
from bytesched.order import Leading
from bytesched.policy import Fifo, Priority
from bytesched.task import CommTask, TaskState


def core_of(credit_bytes: int) -> SchedulerCore:
    return SchedulerCore(Leading(Priority()), credit_bytes=credit_bytes)


def test_wrong_events_are_refused_with_the_story() -> None:
    core = core_of(10)
    with pytest.raises(InvalidTransition, match="not held"):
        core.release()
    a, b = planned([10, 10])
    with pytest.raises(InvalidTransition, match="t0"):
        core.ready(a)
    ready(core, a)
    ready(core, b)
    for event in (core.finish, core.fail):
        with pytest.raises(InvalidTransition, match="ready"):
            event(b)
    core.finish(a)
    with pytest.raises(InvalidTransition, match="finish"):
        core.finish(a)


def test_story_tells_one_task_or_all() -> None:
    core = core_of(10)
    a, b = planned([10, 10])
    ready(core, a)
    ready(core, b)
    core.finish(a)
    assert [line.split() for line in core.story(a).splitlines()] == [
        ["1", "ready", "t0"],
        ["2", "start", "t0"],
        ["4", "finish", "t0"],
    ]
    assert [line.split()[1:] for line in core.story().splitlines()][-2:] == [
        ["finish", "t0"],
        ["start", "t1"],
    ]
    assert "no events" in core.story(planned([1])[0])


def test_the_story_is_bounded() -> None:
    core = core_of(10)
    (task,) = planned([1])
    for _ in range(2000):
        core.finish(*ready(core, task))
        task.rearm()
    numbers = [int(line.split()[0]) for line in core.story().splitlines()]
    assert numbers == list(range(5981, 6001)), "the last 20 of 6000"
    assert len(core._story) <= 2000


def calls_per_task(tasks: int, credit_bytes: int) -> float:
    """Python calls that the core makes per task, over an iteration of that many tasks."""
    core = core_of(credit_bytes)
    plan = planned([1] * tasks)
    calls = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        started = [first for task in reversed(plan) for first in ready(core, task)]
        for task in started:
            started.extend(core.finish(task))
    finally:
        sys.setprofile(None)
    assert len(started) == tasks
    return calls / tasks


@pytest.mark.parametrize("credit_bytes", [1, 8, 10_000])
def test_the_work_per_task_does_not_grow_with_their_number(credit_bytes: int) -> None:
    few, many = calls_per_task(100, credit_bytes), calls_per_task(3000, credit_bytes)
    assert many <= few * 1.02
    assert many < 30


class AnyEvents(RuleBasedStateMachine):
    """A core that is told anything that can legally happen, in any order."""

    @initialize(
        sizes=st.lists(st.integers(1, 40), min_size=1, max_size=10),
        credit_bytes=st.integers(1, 60),
        levels=st.integers(1, 4),
        fifo=st.booleans(),
    )
    def build(self, sizes: list[int], credit_bytes: int, levels: int, fifo: bool) -> None:
        self.core = SchedulerCore(
            Leading(Fifo() if fifo else Priority()), credit_bytes=credit_bytes
        )
        self.fifo = fifo
        self.waiting = planned(sizes, priorities=[i % levels for i in range(len(sizes))])
        self.queued: list[CommTask] = []
        self.in_flight: list[CommTask] = []
        self.stopped = False
        self.held = 0

    def expect_starts(self, started: list[CommTask]) -> None:
        """The rule again, in plain words: most urgent first, while the window is not full."""
        expected = []
        room = self.core.credit_bytes - sum(task.nbytes for task in self.in_flight)
        while self.queued and room > 0 and not (self.stopped or self.held):
            urgent = min(self.queued, key=lambda task: 0 if self.fifo else task.priority)
            self.queued.remove(urgent)
            expected.append(urgent)
            room -= urgent.nbytes
        assert started == expected
        self.in_flight += started

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def become_ready(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(task)
        self.queued.append(task)
        self.expect_starts(ready(self.core, task))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.in_flight))
        self.in_flight.remove(task)
        self.expect_starts(self.core.finish(task))
        task.rearm()
        self.waiting.append(task)

    @rule()
    def hold(self) -> None:
        self.held += 1
        self.core.hold()

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.held -= 1
        self.expect_starts(self.core.release())

    @rule()
    def stop(self) -> None:
        self.stopped = True
        self.core.stop()

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.in_flight))
        self.in_flight.remove(task)
        self.stopped = True
        self.core.fail(task)
        assert task.state is TaskState.FAILED

    @invariant()
    def holds(self) -> None:
        in_flight_bytes = sum(task.nbytes for task in self.in_flight)
        assert self.core.in_flight_bytes == in_flight_bytes
        is_full = in_flight_bytes >= self.core.credit_bytes
        assert self.core.is_held_back == (self.held > 0 and bool(self.queued) and not is_full)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        while self.held:
            self.release()
        while self.in_flight:
            task = self.in_flight.pop(0)
            self.expect_starts(self.core.finish(task))
        assert self.core.in_flight_bytes == 0
        assert self.core.idle or self.stopped
        assert bool(self.queued) <= self.stopped


AnyEvents.TestCase.settings = settings(max_examples=75, stateful_step_count=40)
TestAnyEvents = AnyEvents.TestCase
