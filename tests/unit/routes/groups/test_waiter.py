"""Messages that threads wait for: one task after the other, and what cannot come is found."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations

import pytest
from fake_gloo import CLOSED, TIMEOUT_S, Ends, FakeGloo, FakeWork, fake_group

from bytesched.errors import PeerLost
from bytesched.plugins.routes.groups.messages import Messages, Waiter


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def waiter(ends: Ends) -> Iterator[Waiter]:
    messages = Messages(fake_group(FakeGloo(size=3)))
    made = Waiter(messages, "waiter-of-test", ends.errors.append)
    yield made
    made.stop()
    made.join()
    assert "waiter-of-test" not in {thread.name for thread in threading.enumerate()}


def put(waiter: Waiter, index: int, works: list[tuple[FakeWork, int]], ends: Ends) -> None:
    waiter.put(f"t{index}", works, partial(ends.done, f"t{index}"))


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_ends_are_reported_in_the_order_of_tasks(
    waiter: Waiter, ends: Ends, order: tuple[int, ...]
) -> None:
    """Whatever message comes first."""
    works = [FakeWork() for _ in range(3)]
    for index, work in enumerate(works):
        put(waiter, index, [(work, 1)], ends)
    for index in order:
        works[index].end()
    ends.wait("t2")
    assert ends.names == ["t0", "t1", "t2"]
    assert not ends.errors


def test_a_task_ends_with_the_last_of_its_messages(waiter: Waiter, ends: Ends) -> None:
    works = [FakeWork() for _ in range(2)]
    put(waiter, 0, [(work, peer) for peer, work in enumerate(works, 1)], ends)
    works[0].end()
    assert works[1].waited_for.wait(TIMEOUT_S)
    assert not ends.names
    assert waiter.is_busy
    works[1].end()
    ends.wait("t0")


def test_a_task_without_messages_ends(waiter: Waiter, ends: Ends) -> None:
    put(waiter, 0, [], ends)
    ends.wait("t0")


def test_it_is_not_busy_when_the_last_end_is_reported(waiter: Waiter, ends: Ends) -> None:
    busy: list[bool] = []

    def done(name: str) -> None:
        busy.append(waiter.is_busy)
        ends.done(name)

    works = [FakeWork(), FakeWork()]
    for index, work in enumerate(works):
        waiter.put(f"t{index}", [(work, 1)], partial(done, f"t{index}"))
    assert waiter.is_busy
    for work in works:
        work.end()
    ends.wait("t0", "t1")
    assert busy == [True, False]


def test_a_message_that_fails_ends_its_task_alone(waiter: Waiter, ends: Ends) -> None:
    works = [FakeWork() for _ in range(2)]
    for index, work in enumerate(works):
        put(waiter, index, [(work, 1)], ends)
    works[0].end(CLOSED)
    works[1].end()
    ends.wait("t1")
    assert ends.names == ["t1"]
    (error,) = ends.errors
    assert isinstance(error, PeerLost)
    assert error.task == "t0"


def test_what_fails_after_the_stop_is_no_error(waiter: Waiter, ends: Ends) -> None:
    work = FakeWork()
    put(waiter, 0, [(work, 1)], ends)
    waiter.stop()
    work.end(CLOSED)
    waiter.join()
    assert (ends.errors, ends.names, waiter.is_busy) == ([], [], False)


class Waiting:
    """A thread that waits for a message of a rank."""

    def __init__(self, messages: Messages, peer: int) -> None:
        self.work = FakeWork()
        self.error: BaseException | None = None
        self._wait: Callable[[], None] = lambda: messages.wait(self.work, peer, task=f"from {peer}")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self.work.waited_for.wait(TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._wait()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def end(self, error: str | None = None) -> None:
        self.work.end(error)
        self._thread.join(TIMEOUT_S)


def test_a_message_comes_or_fails_with_the_name_of_its_task() -> None:
    messages = Messages(fake_group(FakeGloo()))
    one, other = Waiting(messages, 1), Waiting(messages, 1)
    one.end()
    assert one.error is None
    other.end(CLOSED)
    assert isinstance(other.error, PeerLost)
    assert other.error.task == "from 1"


def test_nothing_is_lost_while_connections_hold() -> None:
    gloo = FakeGloo(size=3)
    messages = Messages(fake_group(gloo))
    waiting = Waiting(messages, 1)
    # Nothing of rank 2 is waited for.
    gloo.gone.add(2)
    assert [messages.lost() for _ in range(3)] == [None] * 3
    waiting.end()


def test_a_message_of_a_rank_that_is_gone_is_lost_with_the_second_look() -> None:
    gloo = FakeGloo(size=3)
    messages = Messages(fake_group(gloo))
    one, other = Waiting(messages, 1), Waiting(messages, 2)
    gloo.gone.add(2)
    assert messages.lost() is None, "it may have arrived before"
    error = messages.lost()
    assert isinstance(error, PeerLost)
    assert error.task == "from 2"
    assert error.peers == (2,)
    one.end()
    other.end()


def test_one_that_came_after_all_is_not_lost() -> None:
    gloo = FakeGloo()
    messages = Messages(fake_group(gloo))
    waiting = Waiting(messages, 1)
    gloo.gone.add(1)
    assert messages.lost() is None
    waiting.end()
    assert messages.lost() is None


def test_one_that_failed_is_not_found_again() -> None:
    gloo = FakeGloo()
    messages = Messages(fake_group(gloo))
    waiting = Waiting(messages, 1)
    gloo.gone.add(1)
    waiting.end(CLOSED)
    assert [messages.lost() for _ in range(3)] == [None] * 3


def test_each_message_has_two_looks_of_its_own() -> None:
    gloo = FakeGloo()
    messages = Messages(fake_group(gloo))
    first = Waiting(messages, 1)
    gloo.gone.add(1)
    assert messages.lost() is None
    first.end()
    second = Waiting(messages, 1)
    assert messages.lost() is None
    assert isinstance(messages.lost(), PeerLost)
    second.end()
