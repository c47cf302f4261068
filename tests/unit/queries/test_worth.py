"""When a split is worth its messages: where much was late in the rounds that asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.plugins.queries.worth import Worth

#: a period between two votes: what was late in each of its rounds that asked
PERIODS = st.lists(st.lists(st.floats(0.0, 1.0), max_size=12), max_size=8)


@pytest.mark.parametrize(
    ("late_share", "begins", "goes_on"),
    [(0.16, True, True), (0.14, False, True), (0.06, False, True), (0.04, False, False)],
)
def test_a_split_is_worth_its_messages_where_much_is_late(
    late_share: float, begins: bool, goes_on: bool
) -> None:
    worth = Worth(is_judged=True)
    for is_split, expected in ((False, begins), (True, goes_on)):
        for _ in range(8):
            worth.note(late_share)
        assert worth.take(is_split=is_split) == expected
    assert not worth.take(is_split=False), "no round has asked"


def test_a_few_rounds_say_nothing_until_they_are_enough() -> None:
    worth = Worth(is_judged=True)
    found = []
    for _ in range(3):
        for _ in range(3):
            worth.note(0.0)
        found.append(worth.take(is_split=True))
    assert found == [True, True, False]
    worth.note(0.0)
    assert worth.take(is_split=False)


def test_while_sizes_are_tuned_whoever_asks_is_split() -> None:
    worth = Worth(is_judged=False)
    for _ in range(20):
        worth.note(0.0)
    assert worth.take(is_split=True)
    assert not worth.take(is_split=True), "no round has asked"


@given(PERIODS, st.booleans(), st.booleans())
def test_it_follows_the_mean_of_the_rounds_since_it_was_last_judged(
    periods: list[list[float]], is_judged: bool, is_split: bool
) -> None:
    worth = Worth(is_judged=is_judged)
    seen: list[float] = []
    for period in periods:
        for late_share in period:
            worth.note(late_share)
        seen += period
        if not period:
            expected, seen = False, []
        elif not is_judged or len(seen) < 8:
            expected = True
        else:
            limit = (0.05 if is_split else 0.15) * len(seen)
            late = 0.0
            for late_share in seen:
                late += late_share
            expected, seen = late >= limit, []
        assert worth.take(is_split=is_split) is expected


def test_it_shows_what_was_late() -> None:
    worth = Worth(is_judged=True)
    worth.note(0.25)
    worth.note(0.75)
    assert repr(worth) == "<Worth 50% late in 2 rounds>"
