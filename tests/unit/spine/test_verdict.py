"""What two sets of iterations say about which is faster."""

from __future__ import annotations

import random

import pytest

from bytesched.verdict import Comparison, Verdict, compared


@pytest.mark.parametrize(
    ("low", "high", "turns", "verdict"),
    [
        (1.15, 1.3, 1, Verdict.PLANNED),
        (1.05, 1.3, 1, Verdict.OPEN),
        (1.05, 1.3, 2, Verdict.PLANNED),
        (0.95, 1.3, 2, Verdict.OPEN),
        (0.95, 1.3, 3, Verdict.PLAIN),
        (0.8, 0.89, 1, Verdict.PLAIN),
        (0.8, 0.95, 1, Verdict.OPEN),
        (0.8, 0.95, 2, Verdict.PLAIN),
    ],
)
def test_verdict(low: float, high: float, turns: int, verdict: Verdict) -> None:
    assert Comparison(1.0, 1.0, 8, low, high).verdict(turns) is verdict


def test_a_short_turn_decides_alone_only_against_a_plan_that_is_far_behind() -> None:
    short = Comparison(0.012, 0.008, 8, 1.4, 1.6)
    assert short.verdict(1) is Verdict.OPEN
    assert short.verdict(2) is Verdict.PLANNED
    assert Comparison(0.008, 0.01, 8, 0.7, 0.9).verdict(1) is Verdict.OPEN
    assert Comparison(0.008, 0.012, 8, 0.6, 0.8).verdict(1) is Verdict.PLAIN


def test_turns_that_contradict_each_other_decide_nothing() -> None:
    """One of them fell into a moment in which the machine was busy."""
    found = compared([[30.0] * 8, [10.0] * 8], [[10.0] * 8, [11.0] * 8])
    assert found.low >= 0.9
    assert not found.is_alike
    assert [found.verdict(turns) for turns in (2, 3)] == [Verdict.OPEN, Verdict.PLAIN]
    assert "within the noise" in str(found)


def test_interval_of_eight_and_eight() -> None:
    """Mann and Whitney's 13 of 64 are left out on each side (tables, 5 %, two-sided)."""
    found = compared([[float(10 + i) for i in range(8)]], [[10.0] * 8])
    assert (found.low, found.high) == (1.1, 1.6)
    assert found.plain_s == 13.5
    assert found.iterations == 8


def test_interval_holds_the_true_ratio_nineteen_times_of_twenty() -> None:
    rng = random.Random(0)

    def block(mean: float) -> list[float]:
        return [rng.gauss(mean, 0.05 * mean) for _ in range(8)]

    intervals = [compared([block(1.2)], [block(1.0)]) for _ in range(1000)]
    assert 920 <= sum(each.low <= 1.2 <= each.high for each in intervals) <= 980


def test_text() -> None:
    assert str(Comparison(0.343, 0.271, 24, 1.2, 1.3)) == (
        "343 ms with plain DDP, 271 with bytesched (24 iterations each): 1.27 x as fast"
    )
    assert str(Comparison(0.0271, 0.0274, 24, 0.97, 1.01)) == (
        "27.1 ms with plain DDP, 27.4 with bytesched (24 iterations each): within the noise of "
        "iterations, so DDP goes on by itself"
    )
    assert str(Comparison(0.0178, 0.0363, 8, 0.4, 0.6)) == (
        "17.8 ms with plain DDP, 36.3 with bytesched (8 iterations each): plain DDP is faster "
        "here, so DDP goes on by itself"
    )


@pytest.mark.parametrize("plain", [[], [[]], [[0.0, 1.0]]])
def test_nothing_to_compare(plain: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        compared(plain, [[1.0]] * len(plain))
