"""What worker 0 of an MXNet store sends to the others, and how it comes to its priorities."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from bytesched.core import SchedulerCore
from bytesched.errors import PeerLost, SchedulerTimeout
from bytesched.plugins.stores.mxnet.channel import _MOST_STRANGERS, Announced, Channel
from bytesched.plugins.stores.mxnet.urgency import Urgency
from bytesched.task import CommTask

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DMLC_NODE_HOST", raising=False)
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "127.0.0.1")


def task(index: int) -> CommTask:
    made = CommTask(f"t{index}", start_at=0, stop_at=1, itemsize=4)
    made.index = index
    return made


class Board:
    """Hands the text of worker 0 to the others."""

    def __init__(self, others: int) -> None:
        self._others = others
        self._texts: SimpleQueue[str] = SimpleQueue()

    def published(self, text: str) -> str:
        for _ in range(self._others if text else 0):
            self._texts.put(text)
        return text or self._texts.get(timeout=WAIT_S)


def test_what_worker_0_starts_is_heard_by_all_others_in_that_order() -> None:
    heard: list[SimpleQueue[list[int]]] = [SimpleQueue() for _ in range(3)]
    workers = [
        Channel(rank, 3, lambda told, rank=rank: heard[rank].put(list(told)), WAIT_S)  # type: ignore[misc]
        for rank in range(3)
    ]
    board = Board(2)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda worker: worker.open(board.published), workers))
    sent = [[7, 300_000], [2], [5, 1, 0]]
    for indices in sent:
        workers[0].send([task(index) for index in indices])
    for rank in (1, 2):
        told: list[int] = []
        while len(told) < 6:
            told += heard[rank].get(timeout=WAIT_S)
        assert told == [7, 300_000, 2, 5, 1, 0]
    assert heard[0].empty()
    workers[1].close()
    workers[0].send([task(3)])
    assert heard[2].get(timeout=WAIT_S) == [3], "another worker's end is not this one's"
    for worker in (*workers, *workers):
        worker.close()


@contextlib.contextmanager
def strangers(text: str, number: int, data: bytes) -> Iterator[None]:
    """Connections to the worker 0 that published `text`, which have sent `data`."""
    host, port, _ = text.split()
    with contextlib.ExitStack() as opened:
        for _ in range(number):
            connection = opened.enter_context(socket.create_connection((host, int(port)), WAIT_S))
            with contextlib.suppress(OSError):
                connection.sendall(data)
        yield


@pytest.mark.parametrize("data", [b"", b"x", b"GET / HTTP/1.1\r\n\r\n"])
def test_strangers_are_not_taken_for_a_worker_and_do_not_hold_it_up(data: bytes) -> None:
    heard: SimpleQueue[list[int]] = SimpleQueue()
    leader = Channel(0, 2, lambda told: None, WAIT_S)
    worker = Channel(1, 2, lambda told: heard.put(list(told)), WAIT_S)
    board = Board(2)
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(leader.open, board.published)
        text = board.published("")
        host, port, _ = text.split()
        with socket.create_connection((host, int(port)), WAIT_S) as hasty:
            # Closing resets the connection.
            hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # More than are kept at a time.
        with strangers(text, _MOST_STRANGERS + 2, data):
            worker.open(board.published)
            opened.result(WAIT_S)
            leader.send([task(4)])
            assert heard.get(timeout=WAIT_S) == [4]
    leader.close()
    worker.close()


def test_strangers_do_not_extend_the_deadline() -> None:
    board, has_ended = Board(1), threading.Event()

    def come(text: str) -> None:
        with contextlib.suppress(OSError):
            while not has_ended.is_set():
                with strangers(text, 1, b""):
                    has_ended.wait(0.01)

    with ThreadPoolExecutor(2) as pool:
        opened = pool.submit(Channel(0, 2, lambda told: None, 1.0).open, board.published)
        pool.submit(come, board.published(""))
        try:
            with pytest.raises(SchedulerTimeout):
                opened.result(WAIT_S)
        finally:
            has_ended.set()


def test_a_worker_that_does_not_come_is_an_error() -> None:
    with pytest.raises(SchedulerTimeout, match="for 1 workers to connect"):
        Channel(0, 2, lambda told: None, 0.05).open(Board(1).published)
    nobody = socket.create_server(("127.0.0.1", 0))
    port = nobody.getsockname()[1]
    nobody.close()
    with pytest.raises(PeerLost, match="worker 0 cannot be reached"):
        Channel(1, 2, lambda told: None, 1.0).open(lambda text: f"127.0.0.1 {port} 00")


def test_alone_there_is_nobody_to_tell() -> None:
    alone = Channel(0, 1, lambda told: None, WAIT_S)
    alone.open(Board(0).published)
    alone.send([task(0)])
    alone.close()


def test_what_was_told_goes_in_that_order_and_waits_for_nobody() -> None:
    core = SchedulerCore(Announced(), credit_bytes=1 << 62)
    tasks = [task(index) for index in range(4)]
    assert core.ordered([2, 3, 1]) == []
    started = []
    for index in (3, 0, 1):
        tasks[index].notify_ready()
        started += core.ready(tasks[index])
    assert [one.index for one in started] == [3, 1], "2 is not ready, and 0 was not told"
    tasks[2].notify_ready()
    assert core.ready(tasks[2]) == [tasks[2]]
    assert core.ordered([0]) == [tasks[0]]
    core.finish(tasks[0])
    tasks[0].rearm()
    tasks[0].notify_ready()
    assert core.ready(tasks[0]) == [], "it was told for the step before"
    core.finish(tasks[3])
    tasks[3].rearm()
    tasks[3].notify_ready()
    assert core.ready(tasks[3]) == []
    assert core.ordered([3, 0]) == [tasks[3], tasks[0]]


class Trainer:
    """Calls for keys in steps of 100 s, of which some begin between the calls and some after."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.urgency = Urgency(lambda: self.now_s)
        self._steps = 0

    def step(self, calls: str, *, sooner: str = "", later: str = "", every_s: float = 9.0) -> str:
        """The keys of one step by their urgency, the least first; one begins ``every_s``."""
        self._steps += 1
        self.now_s = 100.0 * self._steps
        found = {}
        for place, key in enumerate(calls):
            self.urgency.called(key, self._steps)
            if key in sooner:
                found[key] = self.urgency.began(key, self._steps, place)
        for key in later:
            self.now_s += every_s
            found[key] = self.urgency.began(key, self._steps, calls.index(key))
        return "".join(sorted(found, key=found.__getitem__))


def test_what_is_computed_last_is_most_urgent() -> None:
    trainer = Trainer()
    assert trainer.step("abcd", later="dbca") == "abcd", "nothing is known yet"
    assert trainer.step("abcd", later="dbca") == "abcd", "keys were made in the first step"
    assert trainer.step("abcd", later="dbca") == "acbd"
    assert trainer.step("abcd", sooner="abcd") == "acbd", "known for good"


def test_gradients_that_were_there_already_tell_nothing() -> None:
    trainer = Trainer()
    for _ in range(3):
        assert trainer.step("abcd", sooner="abcd") == "abcd"
    assert trainer.step("abcd", later="dcba") == "abcd"
    for _ in range(3):
        # The engine hands over what was there, in the order of its threads.
        assert trainer.step("abcd", sooner="ba", later="dc", every_s=1.0) == "abcd"
        assert trainer.step("abcd", later="bdca", every_s=1.0) == "abcd"


def test_the_few_that_did_not_wait_are_less_urgent() -> None:
    trainer = Trainer()
    trainer.step("abcdef")
    trainer.step("abcdef", sooner="de", later="fbca")
    assert trainer.step("abcdef", later="abcdef") == "acbfde"


def test_a_caller_that_runs_ahead_is_understood() -> None:
    now_s = 0.0
    urgency = Urgency(lambda: now_s)
    for step in (1, 2, 3):
        for key in "abc":
            urgency.called(key, step)
        now_s += 1.0
    for key in "bca":
        urgency.began(key, 2, 0)
    assert sorted("abc", key=lambda key: urgency.began(key, 3, 0)) == list("acb")


def test_what_begins_of_the_step_before_is_not_taken_for_this_one() -> None:
    now_s = 0.0
    urgency = Urgency(lambda: now_s)
    for key in "abcd":
        urgency.called(key, 1)
    for key in "dc":
        urgency.began(key, 1, 0)
    # The caller is ahead: backward is half-way.
    for key in "abcd":
        urgency.called(key, 2)
    for step, keys in ((1, "ba"), (2, "dcba")):
        for key in keys:
            now_s += 1.0
            urgency.began(key, step, 0)
    urgency.called("a", 3)
    assert sorted("abcd", key=lambda key: urgency.began(key, 3, 0)) == list("abcd")
