"""Lanes: what another rank does not expect yet keeps nothing from it that it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from bytesched.plugins.c10d.split.lanes import Lanes
from bytesched.plugins.c10d.split.outbox import Outbox
from bytesched.task import CommTask

_LIMIT_S = 60.0


class Peer:
    """Another rank, which takes the messages that it expects; what is sent to it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.begun: list[str] = []
        self._expected: set[str] = set()
        self._is_over = False
        self._threads: list[threading.Thread] = []
        self.sums = self.outbox(lambda: False)
        self.lanes = Lanes(self.sums, self.outbox)

    def outbox(self, is_held: Callable[[], bool]) -> Outbox:
        outbox = Outbox(
            self.lock,
            is_over=lambda: self._is_over,
            window=lambda _: 2,
            begin=self._begin,
            end=self._end,
            is_held=is_held,
            emptied=lambda: self.lanes.let_go(),
        )
        self._threads.append(threading.Thread(target=outbox.run))
        self._threads[-1].start()
        return outbox

    def put(self, turn: int, *names: str) -> None:
        with self.lock:
            for place, name in enumerate(names):
                queue = self.lanes.put if turn else self.sums.put
                queue(turn, place, CommTask(name, start_at=0, stop_at=1))

    def wait_begun(self, *names: str) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: set(names) <= set(self.begun), _LIMIT_S)

    def expect(self, *names: str) -> None:
        with self._changed:
            self._expected.update(names)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            self.sums.wake()
            self.lanes.wake()
        for thread in self._threads:
            thread.join(_LIMIT_S)
            assert not thread.is_alive()

    def _begin(self, chunk: CommTask) -> None:
        with self._changed:
            self.begun.append(chunk.name)
            self._changed.notify_all()

    def _end(self, _: None, chunk: CommTask) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or chunk.name in self._expected, _LIMIT_S)


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def test_an_earlier_turn_passes_one_that_is_not_expected_yet(peer: Peer) -> None:
    peer.put(2, "2a", "2b", "2c")
    assert peer.wait_begun("2a", "2b")
    peer.put(1, "1a", "1b", "1c")
    assert peer.wait_begun("1a", "1b")
    assert sorted(peer.begun) == ["1a", "1b", "2a", "2b"]
    peer.expect("1a")
    assert peer.wait_begun("1c")
    peer.expect("2a")
    assert peer.wait_begun("2c")


def test_a_later_turn_waits_until_all_of_earlier_ones_has_begun(peer: Peer) -> None:
    with peer.lock:
        peer.put(3, "3a")
        peer.put(1, "1a", "1b", "1c")
        peer.put(0, "sum", "other sum", "last sum")
    assert peer.wait_begun("sum", "other sum")
    assert sorted(peer.begun) == ["other sum", "sum"]
    peer.expect("sum")
    assert peer.wait_begun("last sum", "1a", "1b")
    assert "3a" not in peer.begun
    peer.expect("1a")
    assert peer.wait_begun("1c", "3a")


def test_turns_that_are_over_leave_their_outbox_to_others() -> None:
    lock = threading.RLock()
    is_over = False
    made: list[Outbox] = []

    def make(is_held: Callable[[], bool]) -> Outbox:
        def end(*_: object) -> None:
            nonlocal is_over
            is_over = True

        made.append(
            Outbox(
                lock,
                is_over=lambda: is_over,
                window=lambda _: 2,
                begin=lambda _: None,
                end=end,
                is_held=is_held,
                emptied=lambda: None,
            )
        )
        return made[-1]

    lanes = Lanes(make(lambda: False), make)
    for turn in range(1, 4):
        is_over = False
        with lock:
            lanes.put(turn, 0, CommTask("a", start_at=0, stop_at=1))
        made[1].run()
    with lock:
        lanes.put(4, 0, CommTask("a", start_at=0, stop_at=1))
        lanes.put(5, 0, CommTask("b", start_at=0, stop_at=1))
    assert len(made) == 3
