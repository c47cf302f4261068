"""A given order, and a policy's choice."""

from __future__ import annotations

import pytest
from plans import planned

from bytesched.errors import InvalidTransition
from bytesched.order import Following, Leading
from bytesched.policy import Priority


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
