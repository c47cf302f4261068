"""Messages that threads wait for: one that cannot come is found by two looks at its connection."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fake_gloo import CLOSED, TIMEOUT_S, FakeGloo, FakeWork, fake_group

from bytesched.errors import PeerLost
from bytesched.plugins.routes.groups.messages import Messages


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
