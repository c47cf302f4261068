"""Messages that threads wait for: one task after the other, and what cannot come is found."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import permutations

import pytest
from fake_gloo import CLOSED, TIMEOUT_S, FakeGloo, FakeWork, fake_group

from bytesched.errors import PeerLost
from bytesched.plugins.routes.messages import Messages, Waiter


class Ends:
    """A waiter, and ends of its tasks, by name, as they are reported."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self.names: list[str] = []
        #: whether the waiter was, at each end
        self.busy: list[bool] = []
        self.errors: list[BaseException] = []
        messages = Messages(fake_group(FakeGloo(size=3)))
        self.waiter = Waiter(messages, "waiter-of-test", self.errors.append)

    def put(self, *works: FakeWork) -> None:
        """The next task, t0, t1, ..., whose messages come from rank 1, 2, ..."""
        name, self._count = f"t{self._count}", self._count + 1

        def done() -> None:
            with self._changed:
                self.busy.append(self.waiter.is_busy)
                self.names.append(name)
                self._changed.notify_all()

        self.waiter.put(name, [(work, peer) for peer, work in enumerate(works, 1)], done)

    def wait(self, *names: str) -> None:
        """Returns when these have ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: set(names) <= set(self.names), TIMEOUT_S)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.waiter.stop()
    ends.waiter.join()
    assert "waiter-of-test" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_ends_are_reported_in_the_order_of_tasks(ends: Ends, order: tuple[int, ...]) -> None:
    """Whatever message comes first."""
    works = [FakeWork() for _ in range(3)]
    for work in works:
        ends.put(work)
    assert ends.waiter.is_busy
    for index in order:
        works[index].end()
    ends.wait("t2")
    assert ends.names == ["t0", "t1", "t2"]
    assert not ends.busy[-1]
    assert not ends.errors


def test_a_task_ends_with_the_last_of_its_messages(ends: Ends) -> None:
    works = FakeWork(), FakeWork()
    ends.put(*works)
    works[0].end()
    assert works[1].waited_for.wait(TIMEOUT_S)
    assert not ends.names
    assert ends.waiter.is_busy
    works[1].end()
    ends.wait("t0")
    ends.put()
    ends.wait("t1")


def test_a_message_that_fails_ends_its_task_alone(ends: Ends) -> None:
    works = FakeWork(), FakeWork()
    for work in works:
        ends.put(work)
    works[0].end(CLOSED)
    works[1].end()
    ends.wait("t1")
    assert ends.names == ["t1"]
    (error,) = ends.errors
    assert isinstance(error, PeerLost)
    assert error.task == "t0"


def test_what_fails_after_the_stop_is_no_error(ends: Ends) -> None:
    work = FakeWork()
    ends.put(work)
    ends.waiter.stop()
    work.end(CLOSED)
    ends.waiter.join()
    assert (ends.errors, ends.names, ends.waiter.is_busy) == ([], [], False)


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


@pytest.mark.parametrize("error", [None, CLOSED], ids=["came", "failed"])
def test_one_that_came_or_failed_after_all_is_not_lost(error: str | None) -> None:
    gloo = FakeGloo()
    messages = Messages(fake_group(gloo))
    waiting = Waiting(messages, 1)
    gloo.gone.add(1)
    assert messages.lost() is None
    waiting.end(error)
    assert [messages.lost() for _ in range(2)] == [None] * 2


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
