"""Why a rank stopped: the first note counts, and a store that is silent holds nobody up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from bytesched.plugins.routes.groups import store as module
from bytesched.plugins.routes.groups.store import Notes


def test_the_first_note_counts() -> None:
    """What follows from it would only hide the reason."""
    store = HashStore()
    Notes(store, rank=1).leave("the reason")
    Notes(store, rank=2).leave("a consequence")
    assert Notes(store, rank=0).read() == "; rank 1 said: the reason"
    assert Notes(store, rank=1).read() == ""


def test_without_a_note_there_is_nothing_to_say() -> None:
    assert Notes(HashStore(), rank=0).read() == ""


def test_a_note_may_have_any_text() -> None:
    store = HashStore()
    text = 'ValueError: "größer"\n{}\0'
    Notes(store, rank=3).leave(text)
    assert Notes(store, rank=0).read() == f"; rank 3 said: {text}"


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
