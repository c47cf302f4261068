"""Requests: words go around a ring, answers from rank to rank; a rank listens in one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from connected import connected
from together import together

from bytesched.errors import PeerLost
from bytesched.plugins.routes.groups.group import Group
from bytesched.plugins.zero1.lockstep import Place
from bytesched.plugins.zero1.requests import Requests

RANKS = 5
_T = TypeVar("_T")
_LIMIT_S = 100.0
#: more than a connection holds
LARGE = 8 << 20


class _Rank:
    """One rank's requests, and what it was told of; it answers with its number and the question."""

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.group = group
        self.changed = threading.Condition()
        self.errors: list[BaseException] = []
        self.heard: list[tuple[int, Place, bool]] = []
        #: what is asked is not answered before
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.held: list[tuple[int, bytes]] = []
        self.requests = Requests(group, asked=self._asked, heard=self._hear, failed=self._fail)

    def _asked(self, rank: int, question: bytes) -> None:
        if self.may_answer.is_set():
            self.requests.answer(rank, self.answer_to(question))
        else:
            self._note(self.held, (rank, question))

    def answer_to(self, question: bytes) -> bytes:
        return bytes([self.rank]) * LARGE if question == b"much" else bytes([self.rank]) + question

    def _hear(self, rank: int, place: Place, is_last: bool) -> None:
        self._note(self.heard, (rank, place, is_last))

    def _fail(self, error: BaseException) -> None:
        self._note(self.errors, error)
        self.group.abort()

    def _note(self, into: list[_T], what: _T) -> None:
        with self.changed:
            into.append(what)
            self.changed.notify_all()

    def until(self, done: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(done, _LIMIT_S)

    def ask(self, ranks: list[int], question: bytes) -> dict[int, bytes]:
        return dict(self.requests.ask(dict.fromkeys(ranks, question), task="what is asked"))


def place(number: int) -> Place:
    return Place(number, number, 0, 0, 0)


@pytest.fixture
def ranks() -> Iterator[list[_Rank]]:
    found = [_Rank(group) for group in connected(RANKS)]
    yield found
    for rank in found:
        rank.requests.close()
    for rank in found:
        # What it was raised over holds connections.
        rank.errors.clear()
        rank.group.close()


def end_all(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.requests.announce(place(9), True)
    for rank in ranks:
        assert rank.requests.wait_ended(_LIMIT_S) == []
    assert not any(rank.errors for rank in ranks)


def test_all_hear_all_words_of_a_rank_in_their_order(ranks: list[_Rank]) -> None:
    words = 50

    def announce(number: int) -> None:
        # All at once, and each several before it hears any of its own again.
        for at in range(words):
            ranks[number].requests.announce(place(at), False)

    together(announce, RANKS)
    end_all(ranks)
    for rank in ranks:
        others = [other for other in range(RANKS) if other != rank.rank]
        assert sorted({number for number, _, _ in rank.heard}) == others
        for other in others:
            expected = [*((place(at), False) for at in range(words)), (place(9), True)]
            assert [(p, last) for number, p, last in rank.heard if number == other] == expected


def test_what_was_sent_is_let_go_of(ranks: list[_Rank]) -> None:
    for _ in range(3):
        for rank in ranks:
            rank.requests.announce(place(1), False)
        together(lambda number: ranks[number].ask([(number + 2) % RANKS], b"much"), RANKS)
    for rank in ranks:
        rank.requests.announce(place(2), False)
    for rank in ranks:
        rank.until(lambda: len(rank.heard) == 4 * (RANKS - 1))  # noqa: B023
    end_all(ranks)
    for rank in ranks:
        assert not any(rank.requests._given.values())
        # None since its last word, or what others said after that.
        assert len(rank.requests._sent) < RANKS


def test_every_rank_asks_all_others(ranks: list[_Rank]) -> None:
    def ask(number: int) -> list[dict[int, bytes]]:
        others = [other for other in range(RANKS) if other != number]
        return [ranks[number].ask(others, question) for question in (b"a", b"much", b"b")]

    for number, (first, much, last) in enumerate(together(ask, RANKS)):
        others = {other for other in range(RANKS) if other != number}
        assert first == {other: bytes([other]) + b"a" for other in others}
        assert much == {other: bytes([other]) * LARGE for other in others}
        assert last == {other: bytes([other]) + b"b" for other in others}
    end_all(ranks)


def test_who_answers_late_holds_up_no_other(ranks: list[_Rank]) -> None:
    late = ranks[1]
    late.may_answer.clear()
    asking = threading.Thread(target=ranks[0].ask, args=([1, 2], b"much"))
    asking.start()
    late.until(lambda: late.held)
    # What rank 0 takes after that of rank 1 must not keep rank 2 from answering.
    assert late.ask([2], b"much") == {2: bytes([2]) * LARGE}
    ((rank, question),) = late.held
    late.requests.answer(rank, late.answer_to(question))
    asking.join(_LIMIT_S)
    assert not asking.is_alive()
    end_all(ranks)


def test_a_rank_has_one_thread(ranks: list[_Rank]) -> None:
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("bytesched-ring") == RANKS
    end_all(ranks)


def test_a_rank_that_does_not_end_in_time(ranks: list[_Rank]) -> None:
    for rank in ranks[1:]:
        rank.requests.announce(place(9), True)
    assert ranks[2].requests.wait_ended(0.5) == [0]
    end_all(ranks[:1])


def test_who_has_waited_long_enough_goes_and_harms_nobody(ranks: list[_Rank]) -> None:
    for rank in ranks[1:]:
        rank.requests.announce(place(9), True)
    ranks[0].until(lambda: len(ranks[0].heard) == RANKS - 1)
    for rank in ranks[1:]:
        rank.requests.close()
        rank.group.close()
    ranks[0].requests.announce(place(9), True)
    assert ranks[0].requests.wait_ended(_LIMIT_S) == []
    assert not any(rank.errors for rank in ranks)


def test_a_rank_that_is_lost(ranks: list[_Rank]) -> None:
    ranks[3].group.abort()
    others = [rank for rank in ranks if rank is not ranks[3]]
    for rank in others:
        rank.until(lambda: rank.errors)  # noqa: B023
    assert all(isinstance(rank.errors[0], PeerLost) for rank in others)
    assert list(getattr(ranks[4].errors[0], "peers", ())) == [3]
