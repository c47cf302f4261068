"""The turn of a process: taken, given back before waits, and over at its limit."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from bytesched.errors import SchedulerTimeout
from bytesched.share.tickets import Tickets
from bytesched.share.turn import HELD, Turn, released, turn_figures
from bytesched.urgency import urgent

LONG_S = 100.0
#: no turn of these tests comes to it
NO_LIMITS_S = (LONG_S, LONG_S)


@pytest.fixture
def tickets(tmp_path: Path) -> Tickets:
    return Tickets(tmp_path / "queue", "rank 0 of 2")


@pytest.fixture
def turn(tickets: Tickets) -> Iterator[Turn]:
    turn = Turn(tickets, timeout_s=LONG_S, limits_s=NO_LIMITS_S)
    yield turn
    turn.close()


@pytest.fixture
def other(tickets: Tickets) -> Iterator[Turn]:
    """As another process has it."""
    turn = Turn(tickets, timeout_s=LONG_S, limits_s=NO_LIMITS_S)
    yield turn
    turn.close()


def test_two_take_turns(tickets: Tickets, turn: Turn, other: Turn) -> None:
    order: list[str] = []

    def compute(mine: Turn, name: str) -> None:
        for _ in range(20):
            mine.take()
            order.append(name)
            # The other one is here, unless it has come to its end.
            while len(tickets.standing()) == 1 and order.count("ab".replace(name, "")) < 20:
                pass
            mine.give_back()

    threads = [
        threading.Thread(target=compute, args=pair, daemon=True)
        for pair in ((turn, "a"), (other, "b"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert "".join(order) in ("ab" * 20, "ba" * 20)


def test_it_is_given_back_while_something_is_waited_for(turn: Turn, other: Turn) -> None:
    turn.take()
    with released():
        assert turn not in HELD
        other.take()
        other.give_back()
    assert turn in HELD


def test_it_is_not_taken_again_after_an_error(turn: Turn) -> None:
    turn.take()
    with pytest.raises(ZeroDivisionError), released():
        raise ZeroDivisionError
    assert turn not in HELD


def test_an_urgent_section_is_outside_of_it(turn: Turn) -> None:
    turn.take()
    with urgent("sum of metrics"):
        assert turn not in HELD
    assert turn in HELD


def test_a_wait_for_it_ends_with_who_has_it(tickets: Tickets, other: Turn) -> None:
    mine = Turn(tickets, timeout_s=0.1)
    other.take()
    with pytest.raises(SchedulerTimeout, match=r"rank 0 of 2, process \d+ \(.*\) has"):
        mine.take()
    other.give_back()
    mine.take()
    mine.close()


def test_a_wait_for_it_ends_with_another_error(turn: Turn, other: Turn) -> None:
    def look() -> None:
        raise ConnectionError("rank 1 is gone")

    other.take()
    with pytest.raises(ConnectionError):
        turn.take(look)
    other.give_back()
    turn.take()


def test_it_is_over_at_its_limit(
    tickets: Tickets, other: Turn, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Turn(tickets, timeout_s=LONG_S, limits_s=(0.05, 0.05))
    mine.take()
    other.take()
    assert mine not in HELD
    assert mine.totals.ended == 1
    assert "urgent() around collectives" in caplog.text
    # Who computes goes on without it, and has another one next.
    mine.give_back()
    other.give_back()
    mine.take()
    assert mine in HELD
    mine.close()


def test_a_limit_follows_the_length_of_turns(tickets: Tickets) -> None:
    mine = Turn(tickets, timeout_s=LONG_S, limits_s=(1e-9, LONG_S))
    assert mine._limit_s == LONG_S
    mine.take()
    mine.give_back()
    assert mine._limit_s == 4 * max(mine._lengths_s) < LONG_S


def test_it_ends_when_the_device_has_computed(tickets: Tickets, other: Turn) -> None:
    computed = threading.Event()
    mine = Turn(tickets, timeout_s=LONG_S, queued=lambda: computed.is_set, limits_s=NO_LIMITS_S)
    mine.take()
    mine.give_back()
    assert mine not in HELD
    assert len(tickets.standing()) == 1
    computed.set()
    other.take()
    other.give_back()
    mine.take()
    assert mine in HELD
    mine.close()


def test_a_device_that_computes_on_has_the_limit_too(tickets: Tickets, other: Turn) -> None:
    mine = Turn(tickets, timeout_s=LONG_S, queued=lambda: lambda: False, limits_s=(0.05, 0.05))
    mine.take()
    mine.give_back()
    other.take()
    assert other in HELD
    mine.close()


def test_figures_of_a_process_keep_those_of_turns_that_are_gone(tickets: Tickets) -> None:
    before = turn_figures()["turns"]
    turn = Turn(tickets, timeout_s=LONG_S, limits_s=NO_LIMITS_S)
    turn.take()
    keeper = turn._keeper
    turn.close()
    # Its thread has it for a moment longer.
    assert keeper is not None
    keeper.join(LONG_S)
    gone = weakref.ref(turn)
    del turn
    gc.collect()
    assert gone() is None
    assert turn_figures()["turns"] == before + 1


def test_none_is_taken_after_the_end(turn: Turn) -> None:
    turn.take()
    turn.close()
    assert turn not in HELD
    turn.take()
    assert turn not in HELD


def test_a_forked_child_has_none_and_its_parent_keeps_it(
    tickets: Tickets, turn: Turn, other: Turn
) -> None:
    """As a worker of a loader that is started between forward and backward."""
    turn.take()
    counted = turn_figures()["turns"]
    assert counted
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        turn.take()
        turn.give_back()
        os.write(writing, f"{len(HELD)} held, {turn_figures()['turns']} counted".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 100) == b"0 held, 0 counted"
    assert turn_figures()["turns"] == counted
    os.close(reading)
    os.close(writing)
    assert turn in HELD
    assert len(tickets.standing()) == 1
    turn.give_back()
    other.take()
    assert other in HELD
