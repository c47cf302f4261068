"""Waiting for a key of a store whose setter, or host, may be gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import DistStoreError

from bytesched.errors import PeerLost, TransportError
from bytesched.plugins.routes.groups import store as store_keys
from bytesched.plugins.routes.groups.store import await_keys

TIMEOUT_S = 250.0


class Answers:
    """A store that gives these answers to `check`, the last of them for ever."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)

    def check(self, keys: list[str]) -> bool:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_keys, "_LOOKS_EVERY_S", 0.0)


def lost_at(look: int) -> Callable[[], TransportError | None]:
    """Nobody is lost before that look."""
    looks = iter([None] * look)
    return lambda: next(looks, PeerLost("rank 1 is gone"))


def wait(store: Any, *, lost: Callable[[], TransportError | None], timeout_s: float) -> None:
    await_keys(store, ["a", "b"], timeout_s, lost)


def test_keys_that_are_set_late_are_waited_for() -> None:
    store = Answers(False, False, False, True)
    wait(store, lost=lambda: None, timeout_s=TIMEOUT_S)
    assert store.answers == [True]


def test_keys_of_a_rank_that_is_lost_are_not_waited_for() -> None:
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        wait(Answers(False), lost=lost_at(2), timeout_s=TIMEOUT_S)


def test_a_rank_that_set_its_keys_and_left_is_not_missed() -> None:
    wait(Answers(False, True), lost=lost_at(0), timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("before", [[], [False]])
def test_a_store_whose_host_is_lost_names_the_rank(before: list[bool]) -> None:
    store = Answers(*before, RuntimeError("Connection reset by peer"))
    with pytest.raises(PeerLost, match="rank 1 is gone") as caught:
        wait(store, lost=lost_at(0), timeout_s=TIMEOUT_S)
    assert caught.value.__suppress_context__


def test_an_error_of_the_store_is_raised_where_nobody_is_lost() -> None:
    with pytest.raises(RuntimeError, match="no such store"):
        wait(Answers(RuntimeError("no such store")), lost=lambda: None, timeout_s=TIMEOUT_S)


def test_keys_that_nobody_sets_are_named_at_the_end() -> None:
    with pytest.raises(DistStoreError, match=r"a, b: not set within 0\.01 s"):
        wait(Answers(False), lost=lambda: None, timeout_s=0.01)
