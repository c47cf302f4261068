"""The soak, for some turns: see scripts/soak."""

from __future__ import annotations

from typing import Any

import pytest
import soak_cases
from ranks import Ranks
from soak import Soak

TURNS = 30


@pytest.mark.nightly
@pytest.mark.slow
def test_every_training_that_ends_well_ends_with_0(two_ranks: Ranks) -> None:
    soak = Soak(two_ranks, seed=24, kinds={"ended": 1})
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
def test_nothing_differs_and_nothing_stays(two_ranks: Ranks) -> None:
    soak = Soak(two_ranks, seed=13, kinds={"script": 5, "wander": 5, "faulty": 2})
    for number in range(TURNS):
        soak.turn(number)
    assert not soak.failures
    assert not soak.leaks(), soak.report()


@pytest.mark.parametrize("turn", ["228314401.1022", "228314401.1274"])
def test_others_hear_of_a_backward_pass_that_ended_before_a_chunk_was_complete(
    two_ranks: Ranks, turn: str
) -> None:
    """The rank goes on without bytesched, and owes the others a round."""
    options = {"partition_bytes": 1 << 20, "credit_bytes": 1 << 20, "split": "on"}
    raised = two_ranks.run(soak_cases.faulty, turn, (0, 2, "backward"), options)
    assert raised == ["Fault", "PeerLost"]
