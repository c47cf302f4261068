"""What ranks leave each other in a store whose setter, or host, may be gone or silent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistStoreError

from bytesched.errors import PeerLost, TransportError
from bytesched.plugins.routes import store as module
from bytesched.plugins.routes.store import Notes, await_keys

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
    monkeypatch.setattr(module, "_LOOKS_EVERY_S", 0.0)


def lost_at(look: int) -> Callable[[], TransportError | None]:
    """Nobody is lost before that look."""
    looks = iter([None] * look)
    return lambda: next(looks, PeerLost("rank 1 is gone"))


def wait(
    store: Any,
    lost: Callable[[], TransportError | None] = lambda: None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    await_keys(store, ["a", "b"], timeout_s, lost)


def test_keys_that_are_set_late_are_waited_for() -> None:
    store = Answers(False, False, False, True)
    wait(store)
    assert store.answers == [True]


def test_keys_of_a_rank_that_is_lost_are_not_waited_for() -> None:
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        wait(Answers(False), lost=lost_at(2))


def test_a_rank_that_set_its_keys_and_left_is_not_missed() -> None:
    wait(Answers(False, True), lost=lost_at(0))


@pytest.mark.parametrize("before", [[], [False]])
def test_a_store_whose_host_is_lost_names_the_rank(before: list[bool]) -> None:
    store = Answers(*before, RuntimeError("Connection reset by peer"))
    with pytest.raises(PeerLost, match="rank 1 is gone") as caught:
        wait(store, lost=lost_at(0))
    assert caught.value.__suppress_context__


def test_an_error_of_the_store_is_raised_where_nobody_is_lost() -> None:
    with pytest.raises(RuntimeError, match="no such store"):
        wait(Answers(RuntimeError("no such store")))


def test_keys_that_nobody_sets_are_named_at_the_end() -> None:
    with pytest.raises(DistStoreError, match=r"a, b: not set within 0\.01 s"):
        wait(Answers(False), timeout_s=0.01)


def test_the_first_note_counts() -> None:
    """What follows from it would only hide the reason."""
    store, reason = HashStore(), 'ValueError: "größer"\n{}\0'
    assert Notes(store, rank=0).read() == ""
    Notes(store, rank=1).leave(reason)
    Notes(store, rank=2).leave("a consequence")
    assert Notes(store, rank=0).read() == f"; rank 1 said: {reason}"
    assert Notes(store, rank=1).read() == ""


class Gone:
    """A store whose server has ended."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")

    def compare_set(self, *_: str) -> bytes:
        raise RuntimeError("Broken pipe")


def test_a_store_that_is_gone_has_no_note() -> None:
    store: Any = Gone()
    notes = Notes(store, rank=0)
    notes.leave("the reason")
    assert notes.read() == ""


class Silent:
    """A store whose server is stopped: a call does not end."""

    def __init__(self) -> None:
        self.calls = 0
        self.go_on = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        self.go_on.wait()
        return False

    def compare_set(self, *_: str) -> bytes:
        self.check([])
        return b""


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.01)
    store = Silent()
    yield store
    store.go_on.set()


def test_a_store_that_does_not_answer_is_asked_once(silent: Any) -> None:
    notes = Notes(silent, rank=0)
    notes.leave("the reason")
    assert notes.read() == ""
    notes.leave("another")
    assert silent.calls == 1
