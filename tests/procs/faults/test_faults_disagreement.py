"""Ranks that disagree on the model, the settings or a step: named on each of them, never a hang."""

from __future__ import annotations

from collections.abc import Callable

import faults_disagreement_cases as cases
import pytest
from faults_cases import FAULT_STEP, NO_TIMEOUT_S, TIMEOUT_S
from faults_fixtures import check_ended_well, check_told_of, selected
from faults_runner import RankEnd, Runs, Scenario

runs = pytest.fixture(scope="module")(selected)
pytestmark = pytest.mark.procs

FIRST, OTHER = 0, 1


def each(*scenarios: Scenario) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", scenarios, ids=lambda scenario: scenario.name)


def on_each_rank(name: str, case: Callable[..., object], *args: object) -> list[Scenario]:
    return [
        Scenario(f"{name}-{'rank1' if who else 'rank0'}", case, (who, *args))
        for who in (FIRST, OTHER)
    ]


def culprit_and_other(scenario: Scenario, ends: list[RankEnd]) -> tuple[RankEnd, RankEnd]:
    return (ends[0], ends[1]) if scenario.args[0] == FIRST else (ends[1], ends[0])


def check_mismatch(ends: list[RankEnd], said: str) -> None:
    for end in ends:
        assert not end.hung, end.stderr
        assert (end.code, end.told.get("error")) == (1, "MismatchError"), end.stderr
        assert said in end.told["message"]
        assert end.told["threads_left"] == []


MODELS = {
    "layers": "rank 1 has '0.layers.0.weight",
    "shape": "rank 1 has 'extra (3,)",
    "dtype": "rank 1 has 'layers.0.weight (16, 8) torch.float64'",
    "frozen": "rank 0 has 'layers.0.weight",
    "optimizer": "rank 1 has 'optimizer Adam'",
}


@each(*(Scenario(kind, cases.different_models, (kind, NO_TIMEOUT_S)) for kind in MODELS))
@pytest.mark.one_in(2)
def test_different_models(scenario: Scenario, runs: Runs) -> None:
    check_mismatch(runs.of(scenario), MODELS[scenario.name])


SETTINGS = {"partition_bytes": 512, "policy": "fifo", "compression": "bf16"}


@each(
    *(
        Scenario(name, cases.different_settings, (NO_TIMEOUT_S, [{}, {name: value}]))
        for name, value in SETTINGS.items()
    )
)
@pytest.mark.one_in(3)
def test_different_settings(scenario: Scenario, runs: Runs) -> None:
    check_mismatch(runs.of(scenario), f"{scenario.name} = {SETTINGS[scenario.name]!r}")


@each(
    Scenario(
        "environment",
        cases.different_settings,
        (NO_TIMEOUT_S, [{}, {}]),
        {1: {"BYTESCHED_CROSS_BARRIER": "0"}},
    )
)
def test_different_environment(scenario: Scenario, runs: Runs) -> None:
    check_mismatch(runs.of(scenario), "cross_barrier = False")


REFUSED = {
    "unknown-policy": ({"policy": "abc"}, "ConfigError: no policy 'abc'"),
    "impossible-size": ({"partition_bytes": "12x"}, "ConfigError: partition_bytes = '12x'"),
    "off": ({"enabled": False}, "enabled is off"),
}


@each(
    *(
        scenario
        for name, (fields, _) in REFUSED.items()
        for scenario in on_each_rank(name, cases.one_cannot_wrap, NO_TIMEOUT_S, fields)
    )
)
@pytest.mark.one_in(5)
def test_one_rank_cannot_wrap(scenario: Scenario, runs: Runs) -> None:
    """Before anything collective, and long before any deadline."""
    culprit, other = culprit_and_other(scenario, runs.of(scenario))
    _, why = REFUSED[scenario.name.rpartition("-")[0]]
    assert other.told.get("error") == "MismatchError", other.stderr
    assert f"rank {scenario.args[0]} does not wrap: {why}" in other.told["message"]
    assert not culprit.hung
    assert culprit.told.get("error") == ("ConfigError" if "Error" in why else None)
    for end in (culprit, other):
        assert end.told["threads_left"] == []


@each(*on_each_rank("no-wrap", cases.one_does_not_wrap, TIMEOUT_S))
@pytest.mark.one_in(2)
def test_one_rank_does_not_wrap(scenario: Scenario, runs: Runs) -> None:
    """The one that wraps says so in time; the plain one fails by DDP's own error."""
    plain, wrapped = culprit_and_other(scenario, runs.of(scenario))
    assert wrapped.told.get("error") == "SchedulerTimeout", wrapped.stderr
    assert "does every rank make the same calls of bytesched" in wrapped.told["message"]
    assert not wrapped.hung
    assert wrapped.told["threads_left"] == []
    assert plain.told["error"] == "RuntimeError"


@each(*on_each_rank("dies-in-wrap", cases.dies_in_wrap, NO_TIMEOUT_S))
@pytest.mark.one_in(2)
def test_one_rank_dies_in_wrap(scenario: Scenario, runs: Runs) -> None:
    died, other = culprit_and_other(scenario, runs.of(scenario))
    assert died.code == -9
    check_told_of(other, {"PeerLost"})


@each(*on_each_rank("skips-a-layer-at-first", cases.skips_a_layer, 0, NO_TIMEOUT_S)[1:])
def test_one_rank_skips_a_layer_before_any_bucket_is_full(scenario: Scenario, runs: Runs) -> None:
    """DDP says so, with the numbers of parameters."""
    culprit, other = culprit_and_other(scenario, runs.of(scenario))
    assert culprit.told.get("error") == "RuntimeError", culprit.stderr
    assert "Expected to have finished reduction" in culprit.told["message"]
    check_told_of(other, {"PeerLost"})
    assert "Expected to have finished reduction" in other.told["message"]


@each(*on_each_rank("skips-a-layer", cases.skips_a_layer, FAULT_STEP, NO_TIMEOUT_S))
@pytest.mark.one_in(2)
def test_one_rank_skips_a_layer(scenario: Scenario, runs: Runs) -> None:
    culprit, other = culprit_and_other(scenario, runs.of(scenario))
    assert culprit.told.get("error") == "UnusedParameterError", culprit.stderr
    assert culprit.code == 1
    assert "module.middle.weight" in culprit.told["message"]
    check_ended_well(culprit)
    check_told_of(other, {"PeerLost"})
    assert f"rank {scenario.args[0]} said: " in other.told["message"]
    assert "module.middle.weight" in other.told["message"]


@each(
    *on_each_rank("ends-early", cases.ends_early, NO_TIMEOUT_S),
    *on_each_rank("skips-a-batch", cases.skips_a_batch, NO_TIMEOUT_S),
)
@pytest.mark.one_in(3)
def test_one_rank_has_fewer_batches(scenario: Scenario, runs: Runs) -> None:
    early, other = culprit_and_other(scenario, runs.of(scenario))
    assert early.code == 0
    check_ended_well(early)
    check_told_of(other, {"PeerLost"})


@each(*on_each_rank("corrupts-the-state", cases.corrupts_the_state, NO_TIMEOUT_S))
@pytest.mark.one_in(2)
def test_the_deferred_update_raises(scenario: Scenario, runs: Runs) -> None:
    culprit, other = culprit_and_other(scenario, runs.of(scenario))
    assert culprit.told.get("error") == "RuntimeError", culprit.stderr
    assert "size of tensor" in culprit.told["message"]
    assert culprit.code == 1
    check_ended_well(culprit)
    check_told_of(other, {"PeerLost"})
    assert "size of tensor" in other.told["message"]


@each(
    *(
        Scenario(moment, cases.catches_and_goes_on, (moment, NO_TIMEOUT_S))
        for moment in ("in_forward", "before_backward")
    )
)
def test_training_goes_on_after_an_exception_outside_backward(
    scenario: Scenario, runs: Runs
) -> None:
    for end in runs.of(scenario):
        assert (end.code, end.told.get("equal")) == (0, True), end.stderr
        check_ended_well(end)


@each(Scenario("in_backward", cases.catches_and_goes_on, ("in_backward", NO_TIMEOUT_S)))
def test_training_cannot_go_on_after_an_interrupted_backward(
    scenario: Scenario, runs: Runs
) -> None:
    for end in runs.of(scenario):
        assert end.told.get("error") in ("PluginError", "PeerLost"), end.stderr
        check_ended_well(end)


@each(
    *on_each_rank("lives-on-after-update", cases.stays_alive, "in_update", NO_TIMEOUT_S),
    *on_each_rank("unwraps-in-backward", cases.stays_alive, "in_backward", NO_TIMEOUT_S),
)
@pytest.mark.one_in(3)
def test_the_other_rank_is_told_although_nobody_died(scenario: Scenario, runs: Runs) -> None:
    culprit, other = culprit_and_other(scenario, runs.of(scenario))
    check_told_of(other, {"PeerLost"})
    assert culprit.code == 0, culprit.stderr
    assert culprit.told.get("threads_after_unwrap", []) == []
    check_ended_well(culprit)


@each(*on_each_rank("skips-step", cases.skips_step, NO_TIMEOUT_S))
@pytest.mark.one_in(2)
def test_one_rank_skips_step_as_in_plain_ddp(scenario: Scenario, runs: Runs) -> None:
    for end in runs.of(scenario):
        assert (end.code, end.told.get("equal")) == (0, True), end.stderr
        check_ended_well(end)


@each(
    *on_each_rank("skips-step-of-shard", cases.skips_step_of_shard, "step", NO_TIMEOUT_S),
    Scenario(
        "drops-a-gradient-of-shard",
        cases.skips_step_of_shard,
        (OTHER, "gradient", NO_TIMEOUT_S),
        world_size=3,
    ),
)
@pytest.mark.one_in(3)
def test_one_rank_skips_a_step_that_others_wait_for(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    drops = scenario.args[1]
    assert {end.told.get("error") for end in ends} <= {"MismatchError", "PeerLost"}
    for end in ends:
        check_told_of(end, {"MismatchError", "PeerLost"})
        assert "MismatchError" in (end.told["error"], *end.told["message"].split(": "))
        said = (
            "a gradient was set to None"
            if drops == "gradient"
            else "on one of them a step was left out"
        )
        assert said in end.told["message"]
        assert end.told["state"]["error"] == "PluginError"


@each(*on_each_rank("goes-on", cases.goes_on_after_an_error, NO_TIMEOUT_S))
@pytest.mark.one_in(2)
def test_the_error_stays_until_unwrap(scenario: Scenario, runs: Runs) -> None:
    died, other = culprit_and_other(scenario, runs.of(scenario))
    assert died.code == -9
    assert other.code == 0, other.stderr
    for attempt in ("forward", "step", "flush", "state", "unwrap"):
        told = other.told[attempt]
        assert (told["error"], told["ours"]) == ("PeerLost", True), attempt
    assert other.told["threads_after_unwrap"] == []
    assert other.told["trained_alone"]
    check_ended_well(other)
