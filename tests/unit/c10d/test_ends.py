"""A rank that goes: the others have what it said last, however late they take it."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from connected import two_connected
from together import together

from bytesched.plugins.routes.group_backend import C10dBackend

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

    def allreduce(self, *args: Any) -> _Work:
        return _Work(self._backend.allreduce(*args), self._is_waited_for)


def test_a_vote_of_the_last_round_is_over_before_a_rank_goes() -> None:
    may_take = threading.Event()
    going, late = two_connected()
    going.backend = _Going(going.backend, may_take)
    backends = [
        C10dBackend(group, control)
        for group, control in zip((going, late), two_connected(), strict=True)
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
