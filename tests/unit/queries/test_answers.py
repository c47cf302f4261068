"""Answers: each rank has those of all others, from one thread, whatever order they come in."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from connected import connected

from bytesched.errors import PeerLost
from bytesched.plugins.queries.answers import Answers
from bytesched.plugins.routes.groups.group import Group

RANKS = 5
_LIMIT_S = 100.0


class _Rank:
    """One rank's answers, and what it was told of."""

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.group = group
        self.changed = threading.Condition()
        self.errors: list[BaseException] = []
        self.answers = Answers(group, RANKS, arrived=self._notify, failed=self._fail)

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        self.errors.append(error)
        # As a session does: who waits for this rank first hears of it then.
        self.group.abort()
        self._notify()

    @property
    def own(self) -> torch.Tensor:
        """This rank's number, in its own place."""
        values = torch.zeros(RANKS, dtype=torch.float64)
        values[self.rank] = 1 + self.rank
        return values

    def give(self, question: int, signature: int = 7) -> None:
        self.answers.give(question, signature, self.own)

    def found(self, question: int, signature: int = 7) -> list[float] | None:
        """What is known at last; None: it is missing."""
        total: torch.Tensor | None = None

        def is_over() -> bool:
            nonlocal total
            is_missing = self.answers.is_missing(question, signature)
            total = self.answers.total(question, signature, self.own)
            return total is not None or is_missing

        with self.changed:
            assert self.changed.wait_for(is_over, _LIMIT_S)
        return None if total is None else total.tolist()


@pytest.fixture
def ranks() -> Iterator[list[_Rank]]:
    found = [_Rank(group) for group in connected(RANKS)]
    yield found
    # All before any is gone, as ranks that end a round.
    for rank in found:
        if not rank.errors:
            rank.answers.end_round()
    for rank in found:
        rank.answers.close()
    for rank in found:
        # What it was raised over holds connections.
        rank.errors.clear()
        rank.group.close()


ALL = [1.0, 2.0, 3.0, 4.0, 5.0]


def begin(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.answers.begin_round()


def test_questions_of_two_rounds(ranks: list[_Rank]) -> None:
    for _ in range(2):
        begin(ranks)
        for question in range(2):
            # The last rank first: its answer is there before it is waited for.
            for rank in reversed(ranks):
                rank.give(question)
        assert [rank.found(1) for rank in ranks] == [ALL] * RANKS
        assert [rank.found(0) for rank in ranks] == [ALL] * RANKS
        for rank in ranks:
            rank.answers.end_round()
    assert not any(rank.errors for rank in ranks)


def test_a_rank_has_one_thread(ranks: list[_Rank]) -> None:
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("bytesched-answers") == RANKS


def test_a_rank_that_asks_more_than_the_others_finds_nothing(ranks: list[_Rank]) -> None:
    begin(ranks)
    for rank in ranks:
        rank.give(0)
    for rank in ranks[1:]:
        rank.answers.end_round()
    ranks[0].give(1)
    assert ranks[0].found(0) == ALL
    assert ranks[0].found(1) is None


def test_the_end_of_one_rank_is_known_while_others_are_silent(ranks: list[_Rank]) -> None:
    begin(ranks)
    ranks[1].answers.end_round()
    ranks[0].give(0)
    assert ranks[0].found(0) is None


def test_ranks_that_ask_otherwise_find_nothing(ranks: list[_Rank]) -> None:
    begin(ranks)
    for rank in ranks:
        rank.give(0, signature=8 if rank is ranks[3] else 7)
    assert [rank.found(0, 8 if rank is ranks[3] else 7) for rank in ranks] == [None] * RANKS


def test_a_rank_that_is_ahead_by_a_round(ranks: list[_Rank]) -> None:
    begin(ranks)
    for rank in ranks:
        rank.give(0)
        rank.answers.end_round()
    ranks[2].answers.begin_round()
    ranks[2].give(0)
    assert ranks[0].found(0) == ALL
    begin([rank for rank in ranks if rank is not ranks[2]])
    for rank in ranks:
        if rank is not ranks[2]:
            rank.give(0)
    assert [rank.found(0) for rank in ranks] == [ALL] * RANKS


@pytest.mark.parametrize("answers_before", [0, 1])
def test_what_a_rank_said_before_it_goes_is_taken_while_others_are_silent(
    ranks: list[_Rank], answers_before: int
) -> None:
    begin(ranks)
    going = ranks[2]
    for question in range(answers_before):
        going.give(question)
    going.answers.end_round()
    going.answers.close()
    going.group.close()
    others = [rank for rank in ranks if rank is not going]
    for rank in others:
        rank.give(0)
    expected = ALL if answers_before else None
    assert [rank.found(0) for rank in others] == [expected] * len(others)
    assert not any(rank.errors for rank in ranks)


def lose(lost: _Rank, ranks: list[_Rank]) -> None:
    """Breaks the connections of a rank; returns when each of the others has an error."""
    lost.group.abort()
    for rank in ranks:
        if rank is not lost:
            with rank.changed:
                assert rank.changed.wait_for(lambda: rank.errors, _LIMIT_S)  # noqa: B023
            assert isinstance(rank.errors[0], PeerLost)


def test_a_rank_that_is_lost(ranks: list[_Rank]) -> None:
    begin(ranks)
    # Then each waits for the next one: no other rank stops before the one that waits for rank 3.
    for rank in ranks:
        rank.give(0)
    assert [rank.found(0) for rank in ranks] == [ALL] * RANKS
    lose(ranks[3], ranks)
    assert list(getattr(ranks[2].errors[0], "peers", ())) == [3]


def test_a_rank_that_is_lost_while_others_begin_a_round(ranks: list[_Rank]) -> None:
    """Several may stop at once; each hears of it all the same."""
    begin(ranks)
    lose(ranks[3], ranks)
