"""What is wrapped: which session is found, and which process ends it."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from bytesched.plugins import registry
from bytesched.plugins.ending import wait_for_ends


class Session:
    """Says its name, and writes down what is called."""

    def __init__(self, name: str, root: object = None, **figures: int) -> None:
        self.name = name
        self.root = root
        self.figures = figures
        self.error: BaseException | None = None
        self.calls: list[str] = []

    def flush(self) -> None:
        self.calls.append("flush")

    @property
    def unseen_error(self) -> BaseException | None:
        return self.error

    def restore(self) -> None:
        self.calls.append("restore")

    def leave(self) -> None:
        self.calls.append("leave")

    def disown(self) -> None:
        self.calls.append("disown")

    def fail(self, error: BaseException) -> None:
        self.calls.append("fail")

    def close(self, *, release_parameters: bool = True) -> None:
        self.calls.append("close")

    def stats(self) -> dict[str, int | float | str]:
        return {"mode": self.name, **self.figures}


@pytest.fixture(autouse=True)
def _nothing_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", {})
    monkeypatch.setattr(registry, "_ended", deque())


class Optimizer:
    """Anything with an identity."""


class Model:
    """The same."""


def added(*names: str) -> tuple[list[Optimizer], list[Session]]:
    optimizers, sessions = [Optimizer() for _ in names], [Session(name) for name in names]
    for optimizer, session in zip(optimizers, sessions, strict=True):
        registry.add(optimizer, session)
    return optimizers, sessions


def test_a_process_ends_the_sessions_that_it_made_itself() -> None:
    kept, (before,) = added("before")
    reading, writing = os.pipe()
    if not (child := os.fork()):
        more, (after,) = added("after")
        registry._at_exit()
        os.write(writing, json.dumps([before.calls, after.calls, len(more)]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads(os.read(reading, 200)) == [
        ["flush", "disown"],
        ["flush", "leave", "close"],
        1,
    ]
    registry._at_exit()
    assert before.calls == ["flush", "flush", "leave", "close"]
    assert kept
    os.close(reading)
    os.close(writing)


def test_stats_are_those_of_the_last_wrap_that_has_not_failed() -> None:
    assert registry.stats() == {"mode": "plain"}
    optimizers, sessions = added("first", "second", "third")
    assert registry.stats()["mode"] == "third"
    assert registry.stats(optimizers[0])["mode"] == "first"
    sessions[2].error = RuntimeError()
    assert registry.stats()["mode"] == "second"
    registry.unwrap(optimizers[1])
    assert registry.stats()["mode"] == "first"
    sessions[0].error = RuntimeError()
    assert registry.stats()["mode"] == "third"


def test_figures_are_kept_after_the_end() -> None:
    optimizers, _ = added("first", "second", "third")
    registry.unwrap(optimizers[0])
    registry._at_exit()
    assert [figures["mode"] for figures in registry.ended()] == ["first", "second", "third"]
    assert registry.stats() == {"mode": "third"}
    assert registry.stats(optimizers[2]) == {"mode": "plain"}


def test_figures_of_what_has_failed_have_the_error() -> None:
    session = Session("failed")
    session.error = ValueError("no data")
    registry.add(Optimizer(), session)
    registry._at_exit()
    assert registry.ended() == [{"mode": "failed", "error": "ValueError: no data"}]


def test_a_session_is_found_by_its_optimizers_and_its_model() -> None:
    model, one, another = Model(), Optimizer(), Optimizer()
    session = Session("shared", root=model)
    registry.add(one, session)
    registry.add(another, session)
    assert registry.sessions() == [session]
    assert registry.session_of(model) is registry.session_of(another) is session
    assert registry.session_of(object()) is None
    assert registry.unwrap(model) is model
    assert session.calls == ["flush", "restore", "close"]
    assert not registry.is_wrapped(one)
    assert not registry.is_wrapped(another)


def test_what_was_unwrapped_is_not_ended_again_with_its_model() -> None:
    model, optimizer = Model(), Optimizer()
    session = Session("unwrapped", root=model)
    registry.add(optimizer, session)
    registry.unwrap(optimizer)
    session.root = None
    del model
    wait_for_ends()
    assert session.calls == ["flush", "restore", "close"]


def test_a_model_that_only_its_session_keeps_is_not_ended_twice_at_exit() -> None:
    class Keeping(Session):
        def close(self, *, release_parameters: bool = True) -> None:
            super().close(release_parameters=release_parameters)
            self.root = None

    session = Keeping("keeping", root=Model())
    registry.add(Optimizer(), session)
    registry._at_exit()
    wait_for_ends()
    assert session.calls == ["flush", "leave", "close"]
    assert len(registry.ended()) == 1


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_session_whose_end_waits_for_other_ranks_holds_up_no_other(is_dropped: bool) -> None:
    """They may be waiting for this one in another session, which has to leave first."""
    calls: list[str] = []
    has_left = threading.Event()

    class Waiting(Session):
        def close(self, *, release_parameters: bool = True) -> None:
            calls.append("waits" if has_left.wait(10) else "gave up")

    class Other(Session):
        def leave(self) -> None:
            has_left.set()

    model, optimizers = Model(), [Optimizer(), Optimizer()]
    waiting, other = Waiting("waiting", root=model), Other("other")
    for optimizer, session in zip(optimizers, (waiting, other), strict=True):
        registry.add(optimizer, session)
    if is_dropped:
        waiting.root = None
        del model
    registry._at_exit()
    assert calls == ["waits"]


def test_a_wrapped_store_is_found_also_behind_a_trainer() -> None:
    class Store(Session, registry.WrappedStore):
        def unwrap(self) -> Any:
            return "plain"

    class Trainer:
        def __init__(self) -> None:
            self._kvstore_params = {"kvstore": Store("behind")}

    trainer = Trainer()
    assert registry.stats(Store("itself"))["mode"] == "itself"
    assert registry.stats(trainer)["mode"] == "behind"
    assert registry.unwrap(Store("itself")) == "plain"
    assert registry.unwrap(trainer) is trainer
    assert trainer._kvstore_params == {"kvstore": "plain"}


def test_figures_are_written_when_training_ends(tmp_path: Path) -> None:
    optimizer, session = Optimizer(), Session("cross", rank=3, iterations=12)
    registry.add(optimizer, session, figures=str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()
    registry.unwrap(optimizer)
    (figures,) = json.loads((tmp_path / "runs" / "rank3.figures.json").read_text())
    assert figures == {"mode": "cross", "rank": 3, "iterations": 12}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["rank3.figures.json"]
