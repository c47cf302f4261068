"""What ends beside all threads: the process waits for it, and for what it let go of."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from bytesched.plugins import ending

TIMEOUT_S = 250.0

#: an end that outlives the patience with it; the interpreter would not wait for its thread
SLOW = """
import threading, time
from bytesched.plugins import ending
begun = threading.Event()
def end():
    begun.set()
    time.sleep(0.3)
    print("over", flush=True)
ending.{how}
assert begun.wait(30)
"""


class Subject:
    def end(self) -> None:
        pass


@pytest.mark.parametrize("how", ["end_soon(end, 0.0)", "end_when_gone(type('S', (), {})(), end)"])
def test_a_process_waits_for_ends(how: str, python: Callable[..., str]) -> None:
    assert python("-c", SLOW.format(how=how)) == "over\n"


def test_what_an_end_referred_to_is_gone_when_it_is_over() -> None:
    let_go = threading.Event()
    subject = Subject()
    weakref.finalize(subject, let_go.set)
    ending.end_beside(partial(Subject.end, subject))
    del subject
    ending.wait_for_ends()
    assert let_go.is_set()


def assert_set(event: threading.Event) -> None:
    assert event.wait(TIMEOUT_S)


def test_a_forked_child_waits_for_no_end_of_its_parent() -> None:
    goes_on = threading.Event()
    ending.end_beside(lambda: assert_set(goes_on))
    child = os.fork()
    if not child:
        ending.wait_for_ends()
        os._exit(0)
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert ended == (child, 0)
    finally:
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        goes_on.set()
        ending.wait_for_ends()


def test_what_blocks_does_not_hold_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ending, "_LAST_WAIT_S", 0.0)
    never = threading.Event()
    ending.end_soon(partial(_wait, never), 0.0)
    ending.wait_for_ends()
    ending.wait_for_last()
    assert "1 parts have not ended after 0 s" in caplog.text
    never.set()
    monkeypatch.undo()
    ending.wait_for_last()


def test_what_has_deadlines_is_waited_for_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ending, "_LAST_WAIT_S", 0.0)
    looks: list[float] = []
    goes_on = threading.Event()

    def look(pause_s: float) -> None:
        # As often as it takes for a deadline of nothing to have passed.
        looks.append(pause_s)
        if len(looks) == 3:
            goes_on.set()

    monkeypatch.setattr("time.sleep", look)
    ending.end_beside(partial(_wait, goes_on))
    ending.wait_for_last()
    assert goes_on.is_set()


def _wait(event: threading.Event) -> None:
    event.wait(TIMEOUT_S)
