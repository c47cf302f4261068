"""Where the workers of a store meet, and what becomes of those who wait there."""

from __future__ import annotations

import math

import pytest

from bytesched.errors import PeerLost
from bytesched.plugins.stores.mpi.meetings import Meetings


def test_all_come_to_do_the_same() -> None:
    meetings = Meetings(2, set())
    assert meetings.come(0, 1, "init 'a'") is None
    assert meetings.come(1, 1, "barrier") is None
    assert meetings.come(0, 0, "init 'a'") == ""
    assert meetings.overdue(math.inf) == "worker 0 at: barrier"


def test_what_differs_is_said() -> None:
    meetings = Meetings(3, set())
    meetings.come(7, 2, "init 'b'")
    meetings.come(7, 0, "init 'a'")
    assert (
        meetings.come(7, 1, "init 'a'") == "worker 0 called init 'a', and worker 2 called init 'b'"
    )
    assert not meetings.overdue(math.inf)


def test_all_who_are_missing_are_named() -> None:
    meetings = Meetings(3, set())
    meetings.come(0, 1, "barrier")
    assert not meetings.overdue(0.0)
    assert meetings.overdue(math.inf) == "worker 0, 2 at: barrier"


def test_who_left_is_not_waited_for() -> None:
    left: set[int] = set()
    meetings = Meetings(3, left)
    meetings.come(0, 0, "barrier")
    left.add(2)
    with pytest.raises(PeerLost, match="worker 2 left; others are at: barrier"):
        meetings.check()
    with pytest.raises(PeerLost, match="worker 2 left"):
        Meetings(3, left).come(0, 0, "barrier")


def test_who_leaves_after_a_meeting_is_not_missed() -> None:
    left: set[int] = set()
    meetings = Meetings(2, left)
    meetings.come(0, 0, "barrier")
    meetings.come(0, 1, "barrier")
    left.add(0)
    meetings.check()
