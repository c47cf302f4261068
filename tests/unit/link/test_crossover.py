"""Jobs that take turns, against the formula for two of one pace, and the bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytesched.link.crossover import SharingJob, bound_share, turn_rates, work

times = st.floats(1.0, 20.0)


def job(compute_s: float, exposed_s: float) -> SharingJob:
    iteration_s = compute_s + exposed_s
    return SharingJob(compute_s, iteration_s, exposed_s, iteration_s)


@settings(max_examples=30)
@given(compute_s=times, share=st.floats(0, 3))
def test_two_jobs_of_one_pace(compute_s: float, share: float) -> None:
    exposed_s = share * compute_s
    expected_s = 2 * compute_s + 2 * max(0, exposed_s - compute_s)
    for rate in turn_rates([job(compute_s, exposed_s)] * 2):
        assert 1 / rate == pytest.approx(expected_s, rel=0.02)


@pytest.mark.parametrize(
    ("jobs", "times"),
    [
        (((10, 0), (10, 0)), 1.0),
        (((10, 2), (10, 2)), 1.2),
        (((10, 5), (10, 5)), 1.5),
        (((10, 10), (10, 10)), 2.0),
        (((10, 20), (10, 20)), 1.5),
        (((10, 2), (5, 10)), 1.8),
        (((10, 10), (30, 1)), 1.275),
        (((10, 20), (10, 20), (10, 20)), 1.5),
    ],
)
def test_work(jobs: tuple[tuple[float, float], ...], times: float) -> None:
    found = [job(*one) for one in jobs]
    rates = turn_rates(found)
    assert work(found, rates) == pytest.approx(times, rel=0.02)
    assert bound_share(found, rates) == pytest.approx(1.0, rel=0.02)


def test_the_bound_of_what_is_done_one_after_the_other() -> None:
    found = [job(10, 10)] * 2
    assert bound_share(found, [1 / 40] * 2) == 0.5
    assert work(found, [1 / 40] * 2) == 1.0
