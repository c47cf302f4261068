"""In which order rounds go, and what ranks say: without messages and threads."""

from __future__ import annotations

import pytest

from bytesched.course import MEASURED_ROUNDS, PLANNED_AFTER, Course, Say
from bytesched.errors import InvalidTransition


def planned(order: list[int]) -> Course:
    """A course whose next round is the first one in this order."""
    course = Course(len(order))
    assert [course.round_ends() for _ in range(MEASURED_ROUNDS - 1)] == [Say.NOTHING] * 4
    assert course.round_ends() is Say.NUMBERS
    assert course.round_ends() is Say.PLAN
    assert course.order == [2, 1, 0]
    assert course.round_ends(order) is Say.NOTHING
    return course


def test_backwards_order_comes_first_and_then_a_plan() -> None:
    course = Course(3)
    assert course.order == [2, 1, 0]
    course = planned([2, 0, 1])
    assert course.order == [2, 0, 1]
    assert PLANNED_AFTER == MEASURED_ROUNDS + 2


def test_it_is_planned_again_at_growing_intervals() -> None:
    """While another order is planned, this one stays."""
    course = planned([2, 0, 1])
    for rounds in (16, 32, 64, 128, 128):
        assert {course.round_ends() for _ in range(rounds - 1)} == {Say.NOTHING}
        assert course.round_ends() is Say.NUMBERS
        assert course.round_ends() is Say.PLAN
        assert course.order == [2, 0, 1]
        assert course.round_ends([2, 0, 1]) is Say.NOTHING


@pytest.mark.parametrize("heard", [[], [0, 1], [0, 0, 1], [1, 2, 3], [-1, -1, -1]], ids=str)
def test_a_plan_that_is_no_order_is_refused(heard: list[int]) -> None:
    course = Course(3)
    for _ in range(MEASURED_ROUNDS + 1):
        course.round_ends()
    with pytest.raises(InvalidTransition, match="is no order of its tasks"):
        course.round_ends(heard)


def test_a_known_order_is_followed_at_once() -> None:
    course = Course(3)
    course.follow([1, 2, 0])
    assert course.order == [1, 2, 0]
    with pytest.raises(InvalidTransition, match="is no order of its tasks"):
        course.follow([0, 1])
