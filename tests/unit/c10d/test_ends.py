"""A rank that goes: the others have what it said last, however late they take it."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from connected import two_connected
from together import together

from bytesched.plugins.queries.answers import Answers
from bytesched.plugins.routes.group_backend import C10dBackend
from bytesched.plugins.routes.groups.group import Group
from bytesched.plugins.zero1.lockstep import Place
from bytesched.plugins.zero1.requests import Requests

_LIMIT_S = 100.0


class _Work:
    """What was begun here; tells when its end is waited for."""

    def __init__(self, work: Any, is_waited_for: threading.Event) -> None:
        self._work = work
        self._is_waited_for = is_waited_for

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, *limit: timedelta) -> None:
        self._is_waited_for.set()
        self._work.wait(*limit)


class _Going:
    """The connections of the rank that goes first."""

    def __init__(self, backend: Any, is_waited_for: threading.Event) -> None:
        self._backend = backend
        self._is_waited_for = is_waited_for

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def send(self, *args: Any) -> _Work:
        return _Work(self._backend.send(*args), self._is_waited_for)

    def allreduce(self, *args: Any) -> _Work:
        return _Work(self._backend.allreduce(*args), self._is_waited_for)


class _Late:
    """Those of a rank that takes nothing before the other waits for that, or is gone."""

    def __init__(self, backend: Any, may_take: threading.Event) -> None:
        self._backend = backend
        self._may_take = may_take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def recv(self, *args: Any) -> Any:
        assert self._may_take.wait(_LIMIT_S)
        return self._backend.recv(*args)


@pytest.fixture
def may_take() -> threading.Event:
    return threading.Event()


@pytest.fixture
def groups(may_take: threading.Event) -> list[Group]:
    """Of the rank that goes, and of the late one."""
    going, late = two_connected()
    going.backend = _Going(going.backend, may_take)
    late.backend = _Late(late.backend, may_take)
    return [going, late]


def test_a_rank_that_has_ended_its_round_goes_when_all_have_heard_that(
    groups: list[Group], may_take: threading.Event
) -> None:
    errors: list[BaseException] = []
    going, late = (
        Answers(group, 1, arrived=lambda: None, failed=errors.append) for group in groups
    )
    for answers in (going, late):
        answers.begin_round()
        answers.give(0, 7, torch.ones(1, dtype=torch.float64))
        answers.end_round()
    going.close()
    groups[0].close()
    may_take.set()
    late.close()
    groups[1].close()
    assert not errors
    assert late.total(0, 7, torch.ones(1, dtype=torch.float64)) == 2


def test_a_rank_that_asks_no_more_goes_when_all_have_heard_that(
    groups: list[Group], may_take: threading.Event
) -> None:
    errors: list[BaseException] = []
    heard: list[tuple[int, Place, bool]] = []
    going, late = (
        Requests(
            group,
            asked=lambda *_: None,
            heard=lambda *args: heard.append(args),
            failed=errors.append,
        )
        for group in groups
    )
    place = Place(3, 3, 0, 0, 0)
    late.announce(place, True)
    going.announce(place, True)

    def leave() -> None:
        going.wait_ended(_LIMIT_S)
        going.close()

    leaving = threading.Thread(target=leave)
    leaving.start()
    # It may not go before its own word is back.
    leaving.join(0.1)
    assert leaving.is_alive()
    may_take.set()
    leaving.join(_LIMIT_S)
    groups[0].close()
    assert late.wait_ended(_LIMIT_S) == []
    late.close()
    groups[1].close()
    assert not errors
    assert sorted(heard) == [(0, place, True), (1, place, True)]


def test_a_vote_of_the_last_round_is_over_before_a_rank_goes(
    groups: list[Group], may_take: threading.Event
) -> None:
    backends = [
        C10dBackend(group, control) for group, control in zip(groups, two_connected(), strict=True)
    ]
    votes = torch.ones(2, 1)

    def goes(rank: int) -> None:
        if rank:
            assert may_take.wait(_LIMIT_S)
        work = backends[rank].sum(votes[rank], "votes")
        if rank:
            backends[rank].wait(work)
        backends[rank].close()
        may_take.set()

    together(goes)
    assert votes.tolist() == [[2], [2]]
