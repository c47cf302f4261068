"""Which rounds are led and which replayed, and what rank 0 says: without messages and threads."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.core import SchedulerCore
from bytesched.course import (
    LED_ROUNDS,
    REPLAYED_FROM,
    Course,
    Say,
    Words,
    is_repeated,
    is_replayed,
)
from bytesched.errors import InvalidTransition
from bytesched.order import Leading
from bytesched.policy import named_policy
from bytesched.task import CommTask


def ends(course: Course, heard: list[int] | None = None) -> Say:
    """One more round, whoever orders it."""
    if course.is_led:
        course.named(range(course.left))
    return course.round_ends(heard or [])


def replaying(order: list[int]) -> Course:
    course = Course(len(order), replay=True)
    said = [ends(course) for _ in range(LED_ROUNDS + 1)]
    assert said == [Say.NOTHING] * (LED_ROUNDS - 1) + [Say.NUMBERS, Say.PLAN]
    assert course.is_led
    assert ends(course, order) is Say.NOTHING
    return course


def test_an_order_is_planned_of_numbers_and_replayed() -> None:
    assert replaying([2, 0, 1]).replayed == [2, 0, 1]


def test_without_leave_rank_0_leads_for_ever() -> None:
    course = Course(3, replay=False)
    assert {ends(course) for _ in range(12)} == {Say.NOTHING}
    assert course.is_led


def test_numbers_are_due_again_later_and_later() -> None:
    """While another order is planned, this one is replayed."""
    course = replaying([2, 0, 1])
    plans = []
    for _ in range(6):
        rounds = 1
        while ends(course) is Say.NOTHING:
            rounds += 1
        assert ends(course) is Say.PLAN
        assert course.replayed == [2, 0, 1]
        assert ends(course, [2, 0, 1]) is Say.NOTHING
        plans.append(rounds)
    assert plans == [16, 32, 64, 128, 128, 128]
    while ends(course) is not Say.NUMBERS:
        pass
    ends(course)
    ends(course, [0, 1, 2])
    assert course.replayed == [0, 1, 2]


@pytest.mark.parametrize("heard", [[], [0, 1], [0, 1, 1], [-1, -1, -1], [1, 2, 3]])
def test_a_plan_has_every_task_once(heard: list[int]) -> None:
    course = Course(3, replay=True)
    while ends(course) is not Say.PLAN:
        pass
    course.named([0, 1, 2])
    with pytest.raises(InvalidTransition, match="is no order of its tasks"):
        course.round_ends(heard)


@pytest.mark.parametrize(
    ("order", "ranks", "expected"),
    [
        ("leader", 1024, False),
        ("replay", 2, True),
        ("auto", REPLAYED_FROM - 1, False),
        ("auto", REPLAYED_FROM, True),
    ],
)
def test_which_orders_are_replayed(order: str, ranks: int, expected: bool) -> None:
    assert is_replayed(order, ranks) is expected
    assert is_repeated(order, ranks) is (order == "auto" and not expected)


def led(course: Course, *orders: str) -> None:
    for order in orders:
        course.named([int(index) for index in order])
        assert course.round_ends() is Say.NOTHING


def test_an_order_that_stays_is_led_now_and_then() -> None:
    course = Course(3, replay=False, repeat=True)
    led(course, "012", *["210"] * (LED_ROUNDS - 1), "201", *["210"] * LED_ROUNDS)
    for _ in range(16):
        assert course.replayed == [2, 1, 0]
        assert course.round_ends() is Say.NOTHING
    led(course, *["012"] * LED_ROUNDS)
    assert course.replayed == [0, 1, 2]


def test_an_order_that_changes_is_led_for_ever() -> None:
    course = Course(3, replay=False, repeat=True)
    led(course, *["210", "201"] * 20)
    assert course.is_led


def test_a_round_has_every_task_once() -> None:
    course = Course(3, replay=False)
    course.named([0])
    with pytest.raises(InvalidTransition, match="led, 1 of 3 tasks named> ends early"):
        course.round_ends()
    with pytest.raises(InvalidTransition, match="has no place"):
        course.named([1, 2, 0])


def test_nothing_is_named_in_a_replayed_round() -> None:
    with pytest.raises(InvalidTransition, match="replayed, 16 rounds until"):
        replaying([2, 0, 1]).named([0])


def test_the_rest_is_named_in_one_word_once_nothing_else_can_become_ready() -> None:
    words = Words(Course(5, replay=False))
    assert words.started([3], [4]) == [3]
    assert words.started([4], [0, 1, 2]) == [4, 0, 1, 2]
    assert words.started([0], [1, 2]) == []
    assert words.started([1, 2], []) == []
    # The next round.
    with pytest.raises(InvalidTransition, match="has no place"):
        words.started([0], [])


def test_what_was_named_ahead_starts_in_that_order() -> None:
    words = Words(Course(3, replay=False))
    words.started([0], [1, 2])
    with pytest.raises(InvalidTransition, match=r"\[2\] start, but \[1\] were named"):
        words.started([2], [1])


@given(seed=st.integers(0, 10**6), credit=st.integers(1, 5))
def test_rank_0_names_what_it_starts_in_that_order(seed: int, credit: int) -> None:
    """Whenever tasks become ready and finish, over three rounds."""
    chance = random.Random(seed)
    course = Course(8, replay=False)
    words = Words(course)
    queue = Leading(named_policy("priority"))
    leader = SchedulerCore(queue, credit_bytes=credit)
    named: list[int] = []
    started: list[int] = []
    for _ in range(3):
        tasks = [CommTask(f"t{i}", start_at=i, stop_at=i + 1, priority=i) for i in range(8)]
        for index, task in enumerate(tasks):
            task.index = index
        unready, flying = chance.sample(tasks, 8), list[CommTask]()

        def start(begun: list[CommTask], flying: list[CommTask] = flying) -> None:
            if begun:
                named.extend(words.started([task.index for task in begun], queue.waiting()))
                started.extend(task.index for task in begun)
                flying.extend(begun)

        while unready or flying:
            if unready and (not flying or chance.random() < 0.6):
                task = unready.pop()
                task.notify_ready()
                start(leader.ready(task))
            else:
                start(leader.finish(flying.pop(0)))
        assert named == started
        course.round_ends()
    assert len(named) == 24
