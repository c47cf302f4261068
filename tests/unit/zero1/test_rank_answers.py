"""Questions of other ranks: one thread answers each as soon as that can be, and none waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from bytesched.errors import BytesschedError, PeerLost, PluginError, SchedulerTimeout
from bytesched.plugins.dependency.progress import Progress
from bytesched.plugins.zero1.rank_answers import Answering, Reply
from bytesched.plugins.zero1.rank_calls import gathered, packed, packed_error, unpacked
from bytesched.testing import Loopback

_LIMIT_S = 100.0


class _Rank:
    """Answers the name of a question when it is known; what it was asked, by rank."""

    def __init__(self) -> None:
        self.progress = Progress(Loopback(timeout_s=_LIMIT_S).backends[0])
        self.known: set[str] = set()
        self.given: dict[int, Any] = {}
        self.changed = threading.Condition()
        self.answering = Answering(self.progress, _LIMIT_S, find=self._find, answer=self._answer)

    def _find(self, question: bytes) -> Reply:
        name = unpacked(question)
        if name == "nonsense":
            raise PluginError("nobody knows")
        return Reply(
            lambda: name in self.known, lambda: packed(name), lambda: SchedulerTimeout("late")
        )

    def _answer(self, rank: int, answer: bytes) -> None:
        with self.changed:
            try:
                self.given[rank] = unpacked(answer)
            except BytesschedError as error:
                self.given[rank] = error
            self.changed.notify_all()

    def ask(self, rank: int, name: str) -> None:
        self.answering.asked(rank, packed(name))

    def know(self, name: str) -> None:
        with self.progress.lock:
            self.known.add(name)
            self.progress.notify()

    def answer_to(self, rank: int) -> Any:
        with self.changed:
            assert self.changed.wait_for(lambda: rank in self.given, _LIMIT_S)
            return self.given.pop(rank)


@pytest.fixture
def rank() -> Iterator[_Rank]:
    found = _Rank()
    yield found
    found.answering.close()


def test_what_cannot_be_answered_yet_holds_up_nothing(rank: _Rank) -> None:
    rank.ask(1, "later")
    rank.know("now")
    rank.ask(2, "now")
    assert rank.answer_to(2) == "now"
    rank.ask(3, "nonsense")
    assert isinstance(rank.answer_to(3), PluginError)
    assert not rank.given
    rank.know("later")
    assert rank.answer_to(1) == "later"


def test_nobody_asks_and_there_is_no_thread(rank: _Rank) -> None:
    def threads() -> int:
        return [t.name for t in threading.enumerate()].count("bytesched-answering")

    assert not threads()
    for other in range(1, 9):
        rank.ask(other, "later")
    assert threads() == 1


def test_after_an_error_all_are_told(rank: _Rank) -> None:
    rank.ask(1, "later")
    rank.progress.fail(PeerLost("rank 5 is gone"))
    answer = rank.answer_to(1)
    assert isinstance(answer, PeerLost)
    assert "rank 5 is gone" in str(answer)


def test_too_late() -> None:
    rank = _Rank()
    rank.answering = Answering(rank.progress, 0.01, find=rank._find, answer=rank._answer)
    rank.ask(1, "never")
    assert isinstance(rank.answer_to(1), SchedulerTimeout)
    rank.answering.close()


def _asking(answers: Mapping[int, Callable[[], bytes]]) -> Any:
    """Asks ranks that answer so, and takes down who was asked what."""
    asked: dict[int, Any] = {}

    def ask(questions: Mapping[int, bytes], task: str) -> Iterator[tuple[int, bytes]]:
        asked.update({number: unpacked(question) for number, question in questions.items()})
        for number in questions:
            yield number, answers[number]()

    return ask, asked


def test_all_answers_are_taken_though_one_is_an_error(rank: _Rank) -> None:
    ask, asked = _asking(
        {
            1: lambda: packed_error(PluginError("rank 1 has gone on")),
            2: lambda: packed(asked.setdefault("taken", 2)),
        }
    )
    with pytest.raises(PluginError, match="rank 1 has gone on"):
        gathered(rank.progress, ask, "state", {1: 10, 2: 20}, "the state")
    assert asked == {1: ("state", 10), 2: ("state", 20), "taken": 2}


def test_many_ranks_are_asked_by_one_thread(rank: _Rank) -> None:
    names: list[str] = []

    def answer() -> bytes:
        names.append(threading.current_thread().name)
        return packed(len(names))

    ask, _ = _asking(dict.fromkeys(range(1, 64), answer))
    found = gathered(rank.progress, ask, "state", dict.fromkeys(range(1, 64), 0), "the state")
    assert sorted(found) == list(range(1, 64))
    assert set(names) == {"bytesched-ask"}
