"""Some turns of the soak, and of the generator of its trainings: see scripts/soak."""

from __future__ import annotations

import contextlib
from typing import Any

import drawn_cases as cases
import pytest
import soak_cases
from drawn_cases import Fate, verdict_of, verdict_of_ends
from drawn_plans import Plan
from ranks import ExitedRank, Ranks
from soak import Soak, end
from training import SMALL

SHARDED = {"shard": True, "partition_bytes": 256, "credit_bytes": 256, "timeout_s": 15.0}
FATE = Fate(rank=1, step=1, moment="before_step", way="exit")


@pytest.mark.nightly
def test_some_turns() -> None:
    """Comparisons on two and three ranks, a step left out, and ends on as many."""
    soak = Soak(8, kinds={"compared": 5, "skipped": 1, "ended": 2})
    with contextlib.closing(soak):
        for number in (2, 16, 20, 40, 42, 47):
            soak.turn(number)
            assert not soak.failures
    assert soak.counts == {"compared: equal": 3, "skipped: equal": 1, "ended: named by all": 2}


@pytest.mark.parametrize("options", [{"split": "on"}, {"split": "auto"}, {"shard": True}], ids=str)
@pytest.mark.parametrize("seed", ["1", "2", "3", "4"])
@pytest.mark.one_in(4)
def test_a_drawn_training_is_that_of_plain_ddp(
    two_ranks: Ranks, seed: str, options: dict[str, Any]
) -> None:
    """With acts between backward() and step() that no script should do."""
    plan = Plan(seed, options=SMALL | options)
    verdict, wrong = verdict_of(two_ranks.run(cases.compared, plan), plan, None)
    assert verdict == "equal", wrong


@pytest.mark.parametrize(
    ("plan", "fate"),
    [
        (
            Plan("77.167", world_size=4, optimizers=("asgd",), options=SHARDED, calm=True),
            Fate(rank=1, step=2, moment="backward", way="exit"),
        ),
        (
            Plan(
                "77.208",
                world_size=3,
                loop="two_models",
                optimizers=("shadowed", "adamw"),
                options=SHARDED,
                calm=True,
            ),
            Fate(rank=1, step=1, moment="before_step", way="exit"),
        ),
    ],
    ids=["inside a backward pass", "with two models"],
)
@pytest.mark.one_in(2)
def test_an_end_is_heard_of_at_once(plan: Plan, fate: Fate) -> None:
    """Where the others ask for a norm, or wait for an update of the other model."""
    verdict, wrong = end(plan, fate)
    assert verdict == "named by all", wrong


def test_a_rounded_gradient_is_found(two_ranks: Ranks) -> None:
    """A generator that cannot fail proves nothing."""
    plan = Plan("1", options={"compression": "bf16"}, calm=True)
    seen = two_ranks.run(cases.compared, plan)
    assert verdict_of(seen, plan, None)[0] == "differs"


@pytest.mark.parametrize(
    ("code", "said", "verdict"),
    [
        (0, "", "another rank saw nothing"),
        (1, "KeyError", "another rank has no named error"),
        (1, "raised SchedulerTimeout: 15 s", "found by the deadline alone"),
    ],
)
def test_an_end_that_is_not_heard_of_is_found(code: int, said: str, verdict: str) -> None:
    ends = [ExitedRank(code, said, "", 1.0), ExitedRank(0, "reached", "", 1.0)]
    assert verdict_of_ends(ends, Plan("1", options=SHARDED, calm=True), FATE)[0] == verdict


@pytest.mark.parametrize("seed", ["1022", "1274"])
def test_others_hear_of_a_backward_pass_that_ended_before_a_chunk_was_complete(
    two_ranks: Ranks, seed: str
) -> None:
    """The rank goes on without bytesched, and owes the others a round."""
    options = {"partition_bytes": 1 << 20, "credit_bytes": 1 << 20, "split": "on"}
    plan = Plan(seed, options=options, calm=True)
    raised = two_ranks.run(cases.survived, plan, Fate(0, 2, "backward", "exception"))
    assert raised == ["Fault", "PeerLost"]


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
        for number in range(30):
            soak.turn(number)
    assert not soak.failures
    assert not soak.leaks(), soak.report()
