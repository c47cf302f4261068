"""A wait of the user's thread: others have the turn on a shared device meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bytesched.plugins.dependency.progress import Progress
from bytesched.share.tickets import Tickets
from bytesched.share.turn import HELD, Turn
from bytesched.testing import Loopback

LIMIT_S = 100.0


@pytest.fixture
def progress() -> Progress:
    return Progress(Loopback(timeout_s=LIMIT_S).backends[0])


@pytest.fixture
def turn(tmp_path: Path) -> Iterator[Turn]:
    tickets = Tickets(tmp_path / "queue", "rank 0")
    turn = Turn(tickets, timeout_s=LIMIT_S, limits_s=(LIMIT_S, LIMIT_S))
    turn.take()
    yield turn
    turn.close()


def test_a_wait_gives_the_turn_back_until_it_is_over(
    progress: Progress, turn: Turn, tmp_path: Path
) -> None:
    done = threading.Event()

    def other_job() -> None:
        """Computes, and so brings what is waited for."""
        other = Turn(Tickets(tmp_path / "queue", "rank 0"), timeout_s=LIMIT_S)
        other.take()
        done.set()
        other.close()
        with progress.lock:
            progress.notify()

    thread = threading.Thread(target=other_job)
    thread.start()
    progress.wait(done.is_set, "the gradient")
    thread.join()
    assert turn in HELD
    assert turn.totals.turns == 2


def test_what_is_here_already_costs_no_turn(progress: Progress, turn: Turn) -> None:
    progress.wait(lambda: True, "the gradient")
    assert turn in HELD
    assert turn.totals.turns == 1


def test_an_error_ends_the_turn(progress: Progress, turn: Turn) -> None:
    progress.fail(ZeroDivisionError("of the other rank"))
    with pytest.raises(ZeroDivisionError):
        progress.wait(lambda: False, "the gradient")
    assert turn not in HELD
