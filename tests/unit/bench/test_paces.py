"""Rates of jobs that began at different moments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.bench.sharing import LEAST_ITERATIONS, common_rates
from bytesched.lab.ranks import BenchError


@given(
    compute_s=st.floats(0.01, 10.0),
    jobs=st.integers(1, 8),
    iterations=st.integers(LEAST_ITERATIONS, 20),
    at_s=st.floats(0.0, 100.0),
)
def test_jobs_in_turns_have_one_pace_and_fill_the_device(
    compute_s: float, jobs: int, iterations: int, at_s: float
) -> None:
    round_s = jobs * compute_s
    # They begin at once; the first one ends its first iteration as the second one computes.
    starts_s = {
        job: [at_s, *(at_s + (1 + job) * compute_s + k * round_s for k in range(iterations))]
        for job in range(jobs)
    }
    rates = common_rates(starts_s)
    assert rates == pytest.approx(dict.fromkeys(range(jobs), 1 / round_s))
    assert sum(rates.values()) * compute_s == pytest.approx(1.0)


def test_each_job_has_its_own_pace() -> None:
    slow, fast = [0.0, 3.0, 6.0, 9.0, 12.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    assert common_rates({0: slow, 3: fast}) == pytest.approx({0: 1 / 3, 3: 1.0})


@pytest.mark.parametrize("other", [[0.0, 10.0, 20.0, 30.0], [4.0, 5.0, 6.0, 7.0]])
def test_too_few_iterations_together_are_said(other: list[float]) -> None:
    with pytest.raises(BenchError, match=r"job [25] had .* paces differ too much"):
        common_rates({2: [0.0, 1.0, 2.0, 3.0], 5: other})
