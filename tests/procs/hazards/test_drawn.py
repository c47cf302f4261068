"""Some turns of the generator of hostile scripts: see scripts/hostile."""

from __future__ import annotations

import contextlib

import drawn_cases as cases
import pytest
from drawn_cases import Fate, Seen
from drawn_plans import Plan
from hostile import Hostile, verdict_of, verdict_of_ends
from ranks import ExitedRank, Ranks

PLAN = Plan("1", calm=True)
SHARDED = {"shard": True, "partition_bytes": 256, "credit_bytes": 256, "timeout_s": 15.0}
FATE = Fate(rank=1, step=1, moment="before_step", way="exit")


def ended(code: int, stdout: str = "", stderr: str = "") -> ExitedRank:
    return ExitedRank(code, stdout, stderr, 1.0)


def test_some_turns() -> None:
    """Comparisons on two, three and four ranks, a step left out, and ends on three and four."""
    hostile = Hostile(8)
    with contextlib.closing(hostile):
        for number in (16, 20, 40, 42, 43, 47):
            hostile.turn(number)
            assert not hostile.failures
    assert hostile.counts == {
        "compared: equal": 3,
        "skipped: equal": 1,
        "ended: named by all": 2,
    }


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
def test_an_end_is_heard_of_at_once(plan: Plan, fate: Fate) -> None:
    """Where the others ask for a norm, or wait for an update of the other model."""
    verdict, wrong = Hostile(0)._ended(plan, fate)
    assert verdict == "named by all", wrong


def test_a_rounded_gradient_is_found(two_ranks: Ranks) -> None:
    """A generator that cannot fail proves nothing."""
    plan = Plan("1", options={"compression": "bf16"}, calm=True)
    seen = two_ranks.run(cases.compared, plan)
    assert verdict_of(seen, plan, None)[0] == "differs"


def test_norms_of_parts_alone_may_be_rounded_otherwise() -> None:
    options = {"shard": True}
    assert Plan("1", world_size=3, options=options).rtol("norm")
    assert not Plan("1", world_size=3, options=options).rtol("weights")
    assert not Plan("1", world_size=2, options=options).rtol("norm")
    assert not Plan("1", world_size=3).rtol("norm")


@pytest.mark.parametrize(
    ("seen", "verdict", "is_wrong"),
    [
        ([Seen(), Seen()], "equal", False),
        ([Seen(), Seen(["weights"])], "differs", True),
        ([Seen(raised="PluginError: no"), Seen()], "raised on some ranks", True),
        ([Seen(raised="PeerLost: 1"), Seen(raised="PeerLost: 0")], "raised", True),
        (
            [Seen(raised="PluginError: no"), Seen(raised="PeerLost: 0")],
            "refused, PluginError: no",
            False,
        ),
    ],
)
def test_what_is_made_of_a_comparison(seen: list[Seen], verdict: str, is_wrong: bool) -> None:
    found, wrong = verdict_of(seen, PLAN, None)
    assert (found, bool(wrong)) == (verdict, is_wrong)


@pytest.mark.parametrize(
    ("other", "ender", "verdict", "is_wrong"),
    [
        (ended(1, "raised PeerLost: 1"), ended(0, "reached"), "named by all", False),
        (ended(1, "finished", "PeerLost: 1"), ended(0, "reached"), "named by all", False),
        (ended(0, "finished"), ended(0, "reached"), "another rank saw nothing", True),
        (ended(1, "", "KeyError"), ended(0, "reached"), "another rank has no named error", True),
        (ended(-9), ended(0, "reached"), "another rank ended with -9", True),
        (
            ended(1, "raised SchedulerTimeout: 15 s"),
            ended(0, "reached"),
            "found by the deadline alone",
            True,
        ),
        (ended(1, "raised PeerLost: 1"), ended(1, "reached"), "the exit ended with 1", True),
        (ended(0), ended(0), "not reached", True),
    ],
)
def test_what_is_made_of_an_end(
    other: ExitedRank, ender: ExitedRank, verdict: str, is_wrong: bool
) -> None:
    found, wrong = verdict_of_ends([other, ender], PLAN, FATE)
    assert (found, bool(wrong)) == (verdict, is_wrong)
