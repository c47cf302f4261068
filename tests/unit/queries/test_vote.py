"""A vote of ranks: yes where all say so, heard in the round after, and never waited for twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from looped import TIMEOUT_S
from together import together

from bytesched.errors import PeerLost
from bytesched.plugins.queries.vote import Vote
from bytesched.plugins.routes.streams import Streams
from bytesched.testing import Loopback

CPU = torch.device("cpu")


def vote_of(backend: Any, failed: list[BaseException] | None = None) -> Vote:
    def raise_first(error: BaseException) -> NoReturn:
        if failed is not None:
            failed.append(error)
        raise error

    context: Any = SimpleNamespace(
        backend=backend, progress=SimpleNamespace(raise_first=raise_first), streams=Streams()
    )
    return Vote(context, "a question", CPU)


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Any]]:
    loopback = Loopback(3, timeout_s=TIMEOUT_S)
    yield loopback.backends
    loopback.close()


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=5))
def test_it_is_yes_where_all_say_yes(ranks: list[Any], rounds: list[list[bool]]) -> None:
    votes = [vote_of(rank) for rank in ranks]

    def of(number: int) -> list[bool | None]:
        found = []
        for said in rounds:
            votes[number].cast(yes=said[number])
            found += [votes[number].outcome(), votes[number].outcome()]
        return found

    # The second time, nothing was cast since.
    expected = [outcome for said in rounds for outcome in (all(said), None)]
    assert together(of, 3) == [expected] * 3


def test_it_is_due_in_rounds_that_double_and_then_at_equal_distances() -> None:
    due = [number for number in range(1, 1025) if Vote.is_due(number)]
    assert due == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]


class Gone:
    """Ranks whose connections are broken, from the beginning or later."""

    rank, size = 0, 2

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self.keys: list[str] = []

    def sum(self, tensor: torch.Tensor, key: str) -> object:
        self.keys.append(key)
        if self.at_once:
            raise PeerLost("rank 1 is gone", peers=[1])
        return object()

    def wait(self, work: object, *, task: str = "") -> None:
        self.keys.append(task)
        raise PeerLost("rank 1 is gone", peers=[1])


def test_a_vote_that_cannot_be_cast_fails_the_session() -> None:
    failed: list[BaseException] = []
    backend = Gone(at_once=True)
    vote = vote_of(backend, failed)
    with pytest.raises(PeerLost) as raised:
        vote.cast(yes=True)
    assert failed == [raised.value]
    assert vote.outcome() is None
    assert backend.keys == ["a question"]


def test_a_vote_that_is_not_heard_fails_the_session_once() -> None:
    failed: list[BaseException] = []
    backend = Gone(at_once=False)
    vote = vote_of(backend, failed)
    vote.cast(yes=True)
    assert "under way" in repr(vote)
    with pytest.raises(PeerLost) as raised:
        vote.outcome()
    assert failed == [raised.value]
    assert backend.keys == ["a question"] * 2
    assert vote.outcome() is None
    assert "none under way" in repr(vote)


class Work:
    """What holds a connection."""


def test_closed_it_holds_no_connection() -> None:
    works = [Work()]
    held = weakref.ref(works[0])
    vote = vote_of(SimpleNamespace(sum=lambda *_: works.pop(), size=1))
    vote.cast(yes=True)
    gc.collect()
    assert held() is not None
    vote.close()
    gc.collect()
    assert held() is None
    assert vote.outcome() is None
