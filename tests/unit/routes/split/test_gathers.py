"""What comes from owners is awaited from both ends, and each of it once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from bytesched.plugins.routes.split.gathers import Gathers

TIMEOUT_S = 100.0
FRONT, BACK = "bytesched-gathers-front", "bytesched-gathers-back"


class Awaited:
    """Receives that a test ends, and on which thread each is waited for."""

    def __init__(self) -> None:
        self.errors: SimpleQueue[BaseException] = SimpleQueue()
        self.gathers = Gathers(self.errors.put)
        #: of what is waited for now
        self.begun: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._over: dict[str, threading.Event] = {}

    def gather(self, name: str) -> Callable[[], None]:
        over = self._over[name] = threading.Event()

        def wait() -> None:
            self.begun.put((name, threading.current_thread().name))
            assert over.wait(TIMEOUT_S)

        return wait

    def end(self, name: str) -> None:
        self._over[name].set()

    def next(self) -> tuple[str, str]:
        return self.begun.get(timeout=TIMEOUT_S)

    def two(self) -> dict[str, str]:
        """What both threads begin to wait for, by thread."""
        return {thread: name for name, thread in (self.next(), self.next())}

    def close(self) -> None:
        for over in self._over.values():
            over.set()
        self.gathers.close()


@pytest.fixture
def awaited() -> Iterator[Awaited]:
    made = Awaited()
    yield made
    made.close()
    made.gathers.close()
    assert not {thread.name for thread in threading.enumerate()} & {FRONT, BACK}


def test_one_thread_waits_for_the_front_and_one_for_the_back(awaited: Awaited) -> None:
    awaited.gathers.add([awaited.gather(name) for name in "abcde"])
    assert awaited.two() == {FRONT: "a", BACK: "e"}
    awaited.end("e")
    assert awaited.next() == ("d", BACK)
    awaited.end("a")
    assert awaited.next() == ("b", FRONT)
    awaited.end("d")
    assert awaited.next() == ("c", BACK)
    for name in "bc":
        awaited.end(name)
    assert awaited.begun.empty()


def test_what_is_added_later_is_waited_for_after_it(awaited: Awaited) -> None:
    awaited.gathers.add([awaited.gather(name) for name in "abx"])
    assert awaited.two() == {FRONT: "a", BACK: "x"}
    awaited.gathers.add([awaited.gather("c")])
    awaited.end("a")
    assert awaited.next() == ("b", FRONT)
    awaited.end("b")
    assert awaited.next() == ("c", FRONT)


def test_a_round_that_begins_goes_first(awaited: Awaited) -> None:
    """What was added before it may depend on it."""
    awaited.gathers.add([awaited.gather(name) for name in "abx"])
    assert awaited.two() == {FRONT: "a", BACK: "x"}
    awaited.gathers.begin(lambda: [awaited.gather("first"), awaited.gather("second")])
    awaited.end("a")
    assert awaited.next() == ("first", FRONT)
    awaited.end("first")
    assert awaited.next() == ("second", FRONT)
    awaited.end("second")
    assert awaited.next() == ("b", FRONT)


def test_receives_of_a_round_are_begun_on_a_thread(awaited: Awaited) -> None:
    names: SimpleQueue[str] = SimpleQueue()

    def receive() -> list[Callable[[], None]]:
        names.put(threading.current_thread().name)
        return []

    awaited.gathers.begin(receive)
    awaited.gathers.begin(receive)
    assert [names.get(timeout=TIMEOUT_S) for _ in range(2)] == [FRONT] * 2


def test_what_a_gather_raises_is_reported(awaited: Awaited) -> None:
    def broken() -> None:
        raise ConnectionError("gone")

    awaited.gathers.add([broken])
    assert isinstance(awaited.errors.get(timeout=TIMEOUT_S), ConnectionError)


def test_what_ends_a_wait_on_close_is_not_reported() -> None:
    awaited = Awaited()
    waiting, broken = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        broken.wait(TIMEOUT_S)
        raise ConnectionError("broken by this rank")

    awaited.gathers.add([wait])
    assert waiting.wait(TIMEOUT_S)
    closing = threading.Thread(target=awaited.close)
    closing.start()
    while not awaited.gathers._closed:
        pass
    broken.set()
    closing.join(TIMEOUT_S)
    assert awaited.errors.empty()
