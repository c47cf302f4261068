"""Which rounds are led and which replayed, and what rank 0 says: without messages and threads."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.core import SchedulerCore
from bytesched.course import VOTES_EVERY, Course, Drift, Words
from bytesched.errors import InvalidTransition
from bytesched.order import Leading
from bytesched.policy import named_policy
from bytesched.task import CommTask


def lead(course: Course, order: list[int]) -> None:
    course.named(order)
    assert not course.round_ends()


def replaying(tasks: int = 3) -> Course:
    course = Course(tasks, replay=True)
    while course.is_led:
        lead(course, list(range(tasks)))
    return course


def test_orders_that_converge_are_replayed() -> None:
    course = Course(3, replay=True)
    for _ in range(5):
        assert course.is_led
        lead(course, [2, 0, 1])
    assert course.replayed == [2, 0, 1]


def test_without_leave_rank_0_leads_for_ever() -> None:
    course = Course(3, replay=False)
    for _ in range(12):
        lead(course, [2, 0, 1])
    assert course.is_led


def test_a_vote_is_due_now_and_then_and_counts_one_round_later() -> None:
    course = replaying()
    assert [course.round_ends() for _ in range(VOTES_EVERY)] == [False] * (VOTES_EVERY - 1) + [True]
    assert not course.is_led
    assert not course.round_ends(votes=1)
    assert course.is_led
    # What was learned has stopped to fit.
    lead(course, [0, 1, 2])
    assert course.is_led


@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 5))
def test_every_rank_goes_the_same_course(seed: int, ranks: int) -> None:
    chance = random.Random(seed)
    courses = [Course(4, replay=True) for _ in range(ranks)]
    cast: list[bool] = []
    for _ in range(60):
        votes, cast = sum(cast), []
        assert len({course.is_led for course in courses}) == 1
        assert len({str(course.replayed) for course in courses}) == 1
        if courses[0].is_led:
            order = [0, 1, 2, 3]
            if chance.random() < 0.2:
                chance.shuffle(order)
            for course in courses:
                course.named(order)
        due = {course.round_ends(votes=votes) for course in courses}
        assert len(due) == 1
        if due == {True}:
            cast = [chance.random() < 0.3 for _ in courses]


def test_a_round_has_every_task_once() -> None:
    course = Course(3, replay=False)
    course.named([0])
    with pytest.raises(InvalidTransition, match="led, 1 of 3 tasks named> ends early"):
        course.round_ends()
    with pytest.raises(InvalidTransition, match="has no place"):
        course.named([1, 2, 0])


def test_nothing_is_named_in_a_replayed_round() -> None:
    with pytest.raises(InvalidTransition, match="replayed for 0 rounds"):
        replaying().named([0])


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


def test_drift_is_an_order_that_is_late_round_after_round() -> None:
    drift, now_ns = Drift(), 10**12
    drift.begins(now_ns)
    for late in (True, True, False, True, True):
        now_ns += 6_000_000 if late else 1_000_000
        drift.round_ends(now_ns)
        assert not drift.seen
    drift.round_ends(now_ns + 6_000_000)
    assert drift.seen
    drift.begins(now_ns)
    assert not drift.seen
