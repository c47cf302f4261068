"""A plan is made for several rounds together."""

from __future__ import annotations

from bytesched.ahead import ChunkTimes, Link, Planner, is_measured

#: The last one is ready when forward begins, and is needed first; the second one is needed later.
CHUNKS = [ChunkTimes(10, 0.0, gate=2), ChunkTimes(10, 4.0, gate=1), ChunkTimes(1, 10.0, gate=0)]
FAST, SLOW = Link(0.4, 0.0), Link(1.0, 0.0)


def test_it_is_the_one_with_which_these_rounds_wait_least() -> None:
    """On the fast link nothing is under way any more when the last chunk is ready."""
    planner = Planner("priority", 1)
    assert planner.measured(CHUNKS, FAST, 1.0, is_planned=False) == [0, 1, 2]
    assert planner.measured(CHUNKS, SLOW, 1.0, is_planned=True) == [0, 2, 1]
    # Where the link is slow again, the first order costs 11 s, and the second one 1 s elsewhere.
    assert planner.measured(CHUNKS, FAST, 1.0, is_planned=True) == [0, 2, 1]


def test_old_rounds_are_forgotten() -> None:
    planner = Planner("priority", 1)
    assert [planner.planned(CHUNKS, SLOW) for _ in range(2)] == [[0, 2, 1]] * 2
    # With these two, the second order would wait less until the sixth fast round.
    assert [planner.planned(CHUNKS, FAST) for _ in range(4)][-1] == [0, 1, 2]


def test_a_plan_that_was_slower_twice_is_left() -> None:
    planner = Planner("priority", 1)
    planner.measured(CHUNKS, SLOW, 1.0, is_planned=False)
    assert planner.measured(CHUNKS, SLOW, 1.1, is_planned=True) is not None
    assert planner.measured(CHUNKS, SLOW, 1.1, is_planned=True) is None
    # Without it the rounds are no faster than they were with it.
    assert planner.measured(CHUNKS, SLOW, 1.1, is_planned=False) is not None


def test_rounds_are_measured_as_long_as_there_are_any() -> None:
    assert [number for number in range(1100) if is_measured(number)] == [
        *(1, 5, 13, 29, 61, 125, 253, 509),
        1021,
    ]
