"""A queue of processes: its order, and what becomes of a place whose process has died."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest

from bytesched.errors import PluginError
from bytesched.share.tickets import Tickets

LONG_S = 100.0


@pytest.fixture
def tickets(tmp_path: Path) -> Tickets:
    return Tickets(tmp_path / "queue", "rank 0 of 2")


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[Connection], None]], tuple[int, Connection]]]:
    """Starts a child that calls a function, and is killed at the end if it is not gone."""
    children: list[int] = []

    def started(call: Callable[[Connection], None]) -> tuple[int, Connection]:
        ours, theirs = Pipe()
        if (pid := os.fork()) == 0:
            try:
                call(theirs)
            finally:
                os._exit(0)
        children.append(pid)
        return pid, ours

    yield started
    for pid in children:
        _end(pid)


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _stand(tickets: Tickets) -> Callable[[Connection], None]:
    def call(connection: Connection) -> None:
        ticket = tickets.draw()
        connection.send("drawn")
        connection.recv()
        ticket.give_back()
        connection.send("given back")
        connection.recv()

    return call


def test_the_first_place_is_the_front(tickets: Tickets) -> None:
    first, second, third = (tickets.draw() for _ in range(3))
    assert first.wait(0)
    assert not second.wait(0)
    assert not third.wait(0)
    first.give_back()
    assert second.wait(0)
    assert not third.wait(0)
    assert "rank 0 of 2" in third.front
    assert str(os.getpid()) in third.front
    assert second.front == ""
    second.give_back()
    second.give_back()
    assert third.wait(0)


def test_a_place_that_is_left_in_the_middle_is_passed(tickets: Tickets) -> None:
    first, second, third = (tickets.draw() for _ in range(3))
    second.give_back()
    assert not third.wait(0)
    first.give_back()
    assert third.wait(0)


def test_death_frees_a_place(tickets: Tickets, fork) -> None:  # type: ignore[no-untyped-def]
    pid, connection = fork(_stand(tickets))
    assert connection.recv() == "drawn"
    mine, behind = tickets.draw(), tickets.draw()
    assert not mine.wait(0)
    _end(pid)
    assert mine.wait(LONG_S)
    assert not behind.wait(0)
    assert len(tickets.standing()) == 2


def test_a_stopped_process_keeps_its_place(tickets: Tickets, fork) -> None:  # type: ignore[no-untyped-def]
    """As in a debugger: whoever waits learns its name, and decides how long to wait."""
    pid, connection = fork(_stand(tickets))
    assert connection.recv() == "drawn"
    os.kill(pid, signal.SIGSTOP)
    mine = tickets.draw()
    assert not mine.wait(0.01)
    assert f"process {pid} (" in mine.front
    os.kill(pid, signal.SIGCONT)
    connection.send("give it back")
    assert mine.wait(LONG_S)


def test_a_place_of_a_dead_process_is_none_for_who_comes_later(tickets, fork) -> None:  # type: ignore[no-untyped-def]
    pid, connection = fork(_stand(tickets))
    assert connection.recv() == "drawn"
    _end(pid)
    assert tickets.draw().wait(0)


def test_a_child_of_a_dead_process_keeps_no_place(tickets: Tickets, fork) -> None:  # type: ignore[no-untyped-def]
    """As a worker of a loader may outlive its parent."""

    def call(connection: Connection) -> None:
        ticket = tickets.draw()
        if os.fork() == 0:
            ticket.forget()
            connection.send("child")
            connection.recv()
            os._exit(0)
        connection.recv()

    pid, connection = fork(call)
    assert connection.recv() == "child"
    mine = tickets.draw()
    assert not mine.wait(0)
    _end(pid)
    assert mine.wait(LONG_S)
    connection.send("end")


def test_a_queue_whose_folder_was_removed_begins_anew(tickets: Tickets, tmp_path: Path) -> None:
    lost = tickets.draw()
    for path in (tmp_path / "queue").iterdir():
        path.unlink()
    (tmp_path / "queue").rmdir()
    found = tickets.draw()
    assert found.wait(0)
    lost.give_back()
    found.give_back()


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PluginError, match="nobody else may write there"):
        Tickets(folder, "rank 0")
