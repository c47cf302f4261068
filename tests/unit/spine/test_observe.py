"""Observers see everything and can break nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from bytesched.observe import Observer, Observers


class Recorder(Observer):
    """Writes down every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_span(
        self, track: str, name: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None
    ) -> None:
        self.calls.append(("span", track, name, start_ns, end_ns, args))

    def on_step(self, step: int, at_ns: int) -> None:
        self.calls.append(("step", step, at_ns))

    def close(self) -> None:
        self.calls.append(("close",))


class Raising(Recorder):
    def on_step(self, step: int, at_ns: int) -> None:
        super().on_step(step, at_ns)
        raise RuntimeError("an observer's own trouble")


def tell_all(observers: Observers) -> None:
    observers.on_span("send", "t0", 1, 2, {"bytes": 3})
    observers.on_span("wait", "layer", 1, 2)
    observers.on_step(5, 6)


ALL_CALLS = [
    ("span", "send", "t0", 1, 2, {"bytes": 3}),
    ("span", "wait", "layer", 1, 2, None),
    ("step", 5, 6),
]


def test_every_observer_is_told_everything() -> None:
    recorders = [Recorder(), Recorder()]
    tell_all(Observers(recorders))
    assert [recorder.calls for recorder in recorders] == [ALL_CALLS, ALL_CALLS]


def test_one_that_raises_is_logged_once_and_removed(caplog: pytest.LogCaptureFixture) -> None:
    raising, after = Raising(), Recorder()
    observers = Observers([raising, after])
    with caplog.at_level(logging.ERROR, "bytesched"):
        tell_all(observers)
        tell_all(observers)
    assert raising.calls == ALL_CALLS
    assert after.calls == ALL_CALLS * 2
    (record,) = caplog.records
    assert "on_step" in record.message
    assert record.exc_info is not None


def test_close_is_the_last_call() -> None:
    recorder = Recorder()
    observers = Observers([recorder])
    observers.close()
    observers.close()
    tell_all(observers)
    assert recorder.calls == [("close",)]
    assert not observers


def test_an_interrupt_is_not_swallowed() -> None:
    class Interrupted(Observer):
        def on_step(self, step: int, at_ns: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Observers([Interrupted()]).on_step(1, 2)
