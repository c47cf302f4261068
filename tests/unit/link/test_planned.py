"""The order that all ranks keep to: what each measures, and what is planned of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.course import MEASURED_ROUNDS
from bytesched.errors import InvalidTransition
from bytesched.link.planned import Measured, planned_order

#: bytes of tasks, the most urgent one first
SIZES = [100, 100, 100, 400]


def numbers(bytes_per_s: int, *ready_s: float) -> list[int]:
    return [*([bytes_per_s] * MEASURED_ROUNDS), *(round(1e9 * at_s) for at_s in ready_s)]


@pytest.mark.parametrize(
    ("bytes_per_s", "order"),
    [
        # Task 3 is across before anything else is ready; so is task 2 before task 0.
        (1000, [3, 2, 1, 0]),
        # While task 3 is on the link, all become ready.
        (100, [3, 0, 1, 2]),
        # When it is across, tasks 2 and 1 are.
        (200, [3, 1, 2, 0]),
    ],
)
def test_the_most_urgent_of_what_is_ready_when_the_link_is_free(
    bytes_per_s: int, order: list[int]
) -> None:
    ready = numbers(bytes_per_s, 3.5, 1.9, 1, 0)
    assert planned_order(SIZES, ready, policy="priority", credit_bytes=1) == order


def test_credit_lets_more_go_before_the_urgent() -> None:
    ready = numbers(100, 3, 2, 1, 0)
    assert planned_order(SIZES, ready, policy="priority", credit_bytes=500) == [3, 2, 0, 1]


@given(st.data())
def test_a_plan_is_a_whole_order(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 10**9), min_size=1, max_size=12))
    ready = data.draw(st.lists(st.floats(0, 9), min_size=len(sizes), max_size=len(sizes)))
    rate = data.draw(st.integers(1, 10**11))
    plan = planned_order(sizes, numbers(rate, *ready), policy="priority", credit_bytes=10**6)
    assert sorted(plan) == list(range(len(sizes)))


def test_a_rank_measures_rates_and_medians() -> None:
    measured = Measured()
    for late_ns, busy_ns in ((0, 10**9), (7, 2 * 10**9), (9, 0), (2, 10**8), (1, 10**9)):
        with pytest.raises(InvalidTransition, match=f"{MEASURED_ROUNDS} rounds make a median"):
            measured.numbers()
        measured.round_ends([1000 + late_ns, 1000], nbytes=100, busy_ns=busy_ns)
    assert measured.numbers() == [100, 50, 100 * 10**9, 1000, 100, 2, 0]
    measured.round_ends([8, 4], nbytes=100, busy_ns=10**9)
    assert measured.numbers()[MEASURED_ROUNDS - 1 :] == [100, 4, 0]
