"""Policies, which are registered once, and an order that is given."""

from __future__ import annotations

import pytest
from plans import planned, ready

from bytesched.core import SchedulerCore
from bytesched.errors import ConfigError, InvalidTransition
from bytesched.order import Following, Leading
from bytesched.policy import Fifo, Priority, named_policy, register_policy
from bytesched.task import CommTask


def test_a_policy_is_registered_once() -> None:
    class Smallest:
        def key(self, task: CommTask) -> float:
            return task.nbytes

    register_policy("test-smallest", Smallest)
    register_policy("test-smallest", Smallest)
    with pytest.raises(ConfigError, match="registered already"):
        register_policy("test-smallest", Fifo)
    core = SchedulerCore(Leading(named_policy("test-smallest")), credit_bytes=1)
    order = [started for task in planned([5, 9, 3, 7]) for started in ready(core, task)]
    for task in order:
        order.extend(core.finish(task))
    assert [task.nbytes for task in order] == [5, 3, 7, 9]


def test_a_follower_waits_for_the_head_of_the_order() -> None:
    queue, (a, b, c) = Following(), planned([1, 1, 1])
    queue.add(b)
    assert queue.pop() is None, "no order yet"
    queue.extend([0, 1])
    assert queue.pop() is None, "0 comes first and is not ready here"
    queue.add(a)
    assert [queue.pop(), queue.pop(), queue.pop()] == [a, b, None]
    queue.add(c)
    assert len(queue) == 1


def test_an_index_belongs_to_one_ready_task() -> None:
    queue, (a, b) = Following(), planned([1, 1])
    queue.add(a)
    for index in (0, -1):
        b.index = index
        with pytest.raises(InvalidTransition, match="index"):
            queue.add(b)
    assert len(queue) == 1


def test_a_policy_follows_no_order() -> None:
    with pytest.raises(TypeError, match="policy"):
        Leading(Priority()).extend([0])
