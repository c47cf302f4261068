"""The soak, for some turns: see scripts/soak."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import soak_cases
from ranks import Ranks
from soak import Soak

TURNS = 30


@pytest.mark.nightly
@pytest.mark.slow
def test_every_training_that_ends_well_ends_with_0() -> None:
    soak = Soak(seed=24, kinds={"well": 1})
    for number in range(5):
        soak.turn(number)
    assert not soak.failures


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"split": "on"}, {"split": "auto"}, {"shard": True}])
def test_iterations_leave_nothing(two_ranks: Ranks, options: dict[str, Any]) -> None:
    count = 200
    for threads, descriptors, objects in two_ranks.run(
        soak_cases.left_by_iterations, count, options
    ):
        # Of parameters to spread, each turn under way has a thread, made when there first is one.
        assert threads <= (2 if options.get("shard") else 0)
        assert descriptors <= 0
        # What is under way at a moment differs a little; a turn that is new has its hops, once.
        assert objects < 0.8 * count


@pytest.mark.nightly
@pytest.mark.slow
def test_nothing_differs_and_nothing_stays() -> None:
    soak = Soak(seed=13, kinds={"script": 1})
    with contextlib.closing(soak):
        for number in range(TURNS):
            soak.turn(number)
    assert not soak.failures
    assert not soak.leaks(), soak.report()
