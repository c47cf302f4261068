"""Few threads wait for messages in many lanes; a lane that is stuck holds up itself alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from fake_gloo import CLOSED, TIMEOUT_S, Ends, FakeGloo, FakeWork, fake_group, task_of
from hypothesis import given
from hypothesis import strategies as st

from bytesched.errors import PeerLost, SchedulerClosed
from bytesched.plugins.routes.groups import waiters as module
from bytesched.plugins.routes.groups.messages import Messages
from bytesched.plugins.routes.groups.waiters import Waiters
from bytesched.task import CommTask

NAME = "waiters-of-test"


def threads() -> int:
    return [thread.name for thread in threading.enumerate()].count(NAME)


def all_but_two_have_ended() -> bool:
    """Whether that is so within the time limit."""
    until_s = time.monotonic() + TIMEOUT_S
    while threads() > 2 and time.monotonic() < until_s:
        threading.Event().wait(0.001)
    return threads() == 2


def new_waiters() -> Waiters:
    return Waiters(Messages(fake_group(FakeGloo(size=9))), NAME)


def end(waiters: Waiters) -> None:
    waiters.stop()
    waiters.join()
    assert threads() == 0


@pytest.fixture
def waiters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiters]:
    """For which a message is stuck soon."""
    monkeypatch.setattr(module, "_STUCK_S", 0.01)
    made = new_waiters()
    yield made
    end(made)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), min_size=1, max_size=12))
def test_ends_of_a_lane_are_reported_in_its_order(messages: list[tuple[int, int]]) -> None:
    """Each with its lane, and when it comes among the others."""
    waiters, ends = new_waiters(), Ends()
    works = [FakeWork() for _ in messages]
    for index, ((lane, _), work) in enumerate(zip(messages, works, strict=True)):
        waiters.put(task_of(index, lane=lane), work, 1 + lane, ends.done)
    for index in sorted(range(len(works)), key=lambda index: messages[index][1]):
        works[index].end()
    ends.wait(*(f"t{index}" for index in range(len(works))))
    for lane in range(4):
        mine = [f"t{index}" for index, (of, _) in enumerate(messages) if of == lane]
        assert [name for name in ends.names if name in mine] == mine
    assert not ends.errors
    end(waiters)


def test_a_lane_that_is_stuck_holds_up_no_other(waiters: Waiters) -> None:
    ends = Ends()
    stuck = [FakeWork() for _ in range(4)]
    for lane, work in enumerate(stuck):
        waiters.put(task_of(lane, lane=lane), work, 1 + lane, ends.done)
    for work in stuck:
        assert work.waited_for.wait(TIMEOUT_S)
    # One for each of them, and the spare one.
    assert threads() == 5
    for index in range(4, 8):
        work = FakeWork()
        work.end()
        waiters.put(task_of(index, lane=5), work, 6, ends.done)
    ends.wait("t4", "t5", "t6", "t7")
    assert len(ends.names) == 4
    for work in stuck:
        work.end()
    ends.wait("t0", "t1", "t2", "t3")
    # Those that nothing is left for have ended, or will.
    assert all_but_two_have_ended()


def test_what_comes_in_time_needs_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STUCK_S", TIMEOUT_S)
    waiters, ends = new_waiters(), Ends()
    works = [FakeWork() for _ in range(6)]
    for lane, work in enumerate(works):
        waiters.put(task_of(lane, lane=lane), work, 1 + lane, ends.done)
    for work in works:
        assert work.waited_for.wait(TIMEOUT_S)
        assert threads() == 2
        work.end()
    ends.wait(*(f"t{lane}" for lane in range(6)))
    end(waiters)


def test_a_message_that_fails_ends_its_task_alone(waiters: Waiters) -> None:
    works, ends = [FakeWork() for _ in range(3)], Ends()
    for index, work in enumerate(works):
        waiters.put(task_of(index, lane=index % 2), work, 1, ends.done)
    works[0].end(CLOSED)
    works[1].end()
    works[2].end()
    ends.wait("t0", "t1", "t2")
    assert list(ends.errors) == ["t0"]
    error = ends.errors["t0"]
    assert isinstance(error, PeerLost)
    assert error.task == "t0"


def test_what_fails_after_the_stop_was_closed(waiters: Waiters) -> None:
    work, ends = FakeWork(), Ends()
    waiters.put(task_of(), work, 1, ends.done)
    assert work.waited_for.wait(TIMEOUT_S)
    waiters.stop()
    work.end(CLOSED)
    ends.wait("t0")
    assert isinstance(ends.errors["t0"], SchedulerClosed)


def test_a_message_may_be_begun_by_the_end_of_another(waiters: Waiters) -> None:
    """As a scheduler does, on the thread that reports."""
    ends, over = Ends(), FakeWork()
    over.end()

    def done(task: CommTask, error: BaseException | None) -> None:
        waiters.put(task_of(1), over, 1, ends.done)
        ends.done(task, error)

    waiters.put(task_of(0), over, 1, done)
    ends.wait("t0", "t1")
