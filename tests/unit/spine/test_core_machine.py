"""SchedulerCore: credit, order, failure, story, and the work that it does."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest
from plans import planned, ready

from bytesched.core import SchedulerCore
from bytesched.errors import InvalidTransition
from bytesched.order import Leading
from bytesched.policy import Priority
from bytesched.task import CommTask, TaskState


def core_of(credit_bytes: int) -> SchedulerCore:
    return SchedulerCore(Leading(Priority()), credit_bytes=credit_bytes)


def drain(core: SchedulerCore, started: list[CommTask]) -> list[CommTask]:
    """Finishes tasks in the order of their start until none is left; all starts, in order."""
    order = list(started)
    for task in order:
        order.extend(core.finish(task))
    return order


def test_ready_tasks_start_at_once_while_credit_lasts() -> None:
    core = core_of(100)
    a, b, c = planned([60, 60, 60])
    assert ready(core, a) == [a]
    assert ready(core, b) == [b], "60 of 100 bytes in flight leave credit: b may overdraw it"
    assert ready(core, c) == []
    assert core.in_flight_bytes == 120
    assert core.finish(a) == [c]
    assert drain(core, [b, c]) == [b, c]
    assert core.idle


@pytest.mark.parametrize("credit_bytes", [0, -1])
def test_credit_is_at_least_a_byte(credit_bytes: int) -> None:
    with pytest.raises(ValueError, match="credit"):
        core_of(credit_bytes)


def test_nothing_is_started_after_a_failure() -> None:
    core = core_of(20)
    a, b, c, d = planned([10] * 4)
    for task in (a, b, c):
        ready(core, task)
    core.fail(a)
    assert core.finish(b) == []
    assert ready(core, d) == []
    assert (a.state, core.in_flight_bytes) == (TaskState.FAILED, 0)
    assert (c.state, d.state) == (TaskState.READY, TaskState.READY)


def test_stop_leaves_what_is_in_flight() -> None:
    core = core_of(10)
    a, b = planned([10] * 2)
    ready(core, a)
    core.stop()
    assert ready(core, b) == []
    assert core.finish(a) == []
    assert core.in_flight_bytes == 0


def test_wrong_events_are_refused_with_the_story() -> None:
    core = core_of(10)
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


def test_what_is_held_back_would_start_were_nothing_held() -> None:
    core = core_of(10)
    large, behind = planned([10, 10])
    assert ready(core, large) == [large]
    core.hold()
    assert ready(core, behind) == []
    assert core.is_held_back is False, "it would have waited for credit as well"
    assert core.finish(large) == []
    assert core.is_held_back
    assert core.release() == [behind]
    assert not core.is_held_back


def test_only_what_is_held_is_released() -> None:
    with pytest.raises(InvalidTransition, match="not held"):
        core_of(10).release()


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


def test_repr_shows_the_state() -> None:
    core = core_of(4 << 20)
    for task in planned([3 << 20] * 3):
        ready(core, task)
    assert "1 ready, 2 sending, 6.00/4.00 MiB credit" in repr(core)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_events_give_the_same_story(seed: int) -> None:
    def told() -> str:
        chance = random.Random(seed)
        core = core_of(20)
        tasks = planned([chance.randint(1, 30) for _ in range(6)], priorities=[1, 0, 1, 0, 2, 2])
        in_flight: list[CommTask] = []
        waiting = list(tasks)
        while waiting or in_flight:
            if waiting and chance.random() < 0.6:
                in_flight += ready(core, waiting.pop(chance.randrange(len(waiting))))
            elif in_flight:
                in_flight += core.finish(in_flight.pop(chance.randrange(len(in_flight))))
        return core.story()

    assert told() == told()


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
