"""Ranks that disagree on the model, the settings or a step: named on each of them, never a hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import faults_disagreement_cases as cases
import pytest
from faults_cases import FAULT_STEP
from faults_fixtures import check_ended_well, check_told_of, selected
from faults_runner import RankEnd, Runs, Scenario

runs = pytest.fixture(scope="module")(selected)

FIRST, OTHER = 0, 1


def each(*scenarios: Scenario) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", scenarios, ids=lambda scenario: scenario.name)


def on_each_rank(name: str, case: Callable[..., object], *args: object) -> list[Scenario]:
    return [Scenario(f"{name}-rank{who}", case, (who, *args)) for who in (FIRST, OTHER)]


def culprit_and_other(scenario: Scenario, runs: Runs) -> tuple[RankEnd, RankEnd]:
    first, other = runs.of(scenario)
    return (first, other) if scenario.args[0] == FIRST else (other, first)


DIFFERENT_MODELS = {
    "layers": "rank 1 has '0.layers.0.weight",
    "shape": "rank 1 has 'extra (3,)",
    "dtype": "rank 1 has 'layers.0.weight (16, 8) torch.float64'",
    "frozen": "rank 0 has 'layers.0.weight",
    "optimizer": "rank 1 has 'optimizer Adam'",
}
DIFFERENT_SETTINGS = {"partition_bytes": 512, "policy": "fifo", "compression": "bf16"}
OFF = {1: {"BYTESCHED_CROSS_BARRIER": "0"}}
SAID = {
    **DIFFERENT_MODELS,
    **{name: f"{name} = {value!r}" for name, value in DIFFERENT_SETTINGS.items()},
    "environment": "cross_barrier = False",
}


@each(
    *(Scenario(kind, cases.different_models, (kind,)) for kind in DIFFERENT_MODELS),
    *(
        Scenario(name, cases.different_settings, ({name: value},))
        for name, value in DIFFERENT_SETTINGS.items()
    ),
    Scenario("environment", cases.different_settings, ({},), OFF),
)
@pytest.mark.one_in(2)
def test_different_models_and_settings(scenario: Scenario, runs: Runs) -> None:
    for end in runs.of(scenario):
        assert not end.hung, end.stderr
        assert (end.code, end.told.get("error")) == (1, "MismatchError"), end.stderr
        assert SAID[scenario.name] in end.told["message"]
        assert end.told["threads_left"] == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown-policy": ({"policy": "abc"}, "ConfigError: no policy 'abc'"),
    "impossible-size": ({"partition_bytes": "12x"}, "ConfigError: partition_bytes = '12x'"),
    "off": ({"enabled": False}, "enabled is off"),
}


@each(
    *(
        scenario
        for name, (fields, _) in REFUSED.items()
        for scenario in on_each_rank(name, cases.one_cannot_wrap, fields)
    )
)
@pytest.mark.one_in(5)
def test_one_rank_cannot_wrap(scenario: Scenario, runs: Runs) -> None:
    """Before anything collective, and long before any deadline."""
    culprit, other = culprit_and_other(scenario, runs)
    _, why = REFUSED[scenario.name.rpartition("-")[0]]
    assert other.told.get("error") == "MismatchError", other.stderr
    assert f"rank {scenario.args[0]} does not wrap: {why}" in other.told["message"]
    assert not culprit.hung
    assert culprit.told.get("error") == ("ConfigError" if "Error" in why else None)
    assert culprit.told["threads_left"] == other.told["threads_left"] == []


@each(*on_each_rank("no-wrap", cases.one_does_not_wrap))
@pytest.mark.one_in(2)
def test_one_rank_does_not_wrap(scenario: Scenario, runs: Runs) -> None:
    """The one that wraps says so in time; the plain one fails by DDP's own error."""
    plain, wrapped = culprit_and_other(scenario, runs)
    assert wrapped.told.get("error") == "SchedulerTimeout", wrapped.stderr
    assert "does every rank make the same calls of bytesched" in wrapped.told["message"]
    assert not wrapped.hung
    assert wrapped.told["threads_left"] == []
    assert plain.told["error"] == "RuntimeError"


class Apart(NamedTuple):
    """What one rank does, and how it ends; the other one hears of it by `PeerLost`."""

    case: Callable[..., object]
    args: tuple[object, ...] = ()
    code: int = 0
    error: str | None = None
    #: in the messages of both
    said: str = ""


APART = {
    "dies-in-wrap": Apart(cases.dies_in_wrap, code=-9),
    # DDP says so, with the numbers of parameters, before any bucket is full.
    "skips-a-layer-at-first": Apart(
        *(cases.skips_a_layer, (0,), 1, "RuntimeError", "Expected to have finished reduction")
    ),
    "skips-a-layer": Apart(
        *(cases.skips_a_layer, (FAULT_STEP,), 1, "UnusedParameterError", "module.middle.weight")
    ),
    "has-fewer-batches": Apart(cases.ends_early),
    "skips-a-batch": Apart(cases.skips_a_batch),
    "corrupts-the-state": Apart(
        cases.corrupts_the_state, code=1, error="RuntimeError", said="size of tensor"
    ),
    "lives-on-after-update": Apart(cases.stays_alive, ("in_update",)),
    "unwraps-in-backward": Apart(cases.stays_alive, ("in_backward",)),
}


@each(
    *(
        scenario
        for name, apart in APART.items()
        for scenario in on_each_rank(name, apart.case, *apart.args)
        if scenario.name != "skips-a-layer-at-first-rank0"
    )
)
@pytest.mark.one_in(2)
def test_one_rank_goes_apart(scenario: Scenario, runs: Runs) -> None:
    culprit, other = culprit_and_other(scenario, runs)
    apart = APART[scenario.name.rpartition("-")[0]]
    assert (culprit.code, culprit.told.get("error")) == (apart.code, apart.error), culprit.stderr
    check_told_of(other, {"PeerLost"})
    assert apart.said in other.told["message"]
    if apart.error is not None:
        assert apart.said in culprit.told["message"]
        assert f"rank {scenario.args[0]} said: " in other.told["message"]
    assert culprit.told.get("threads_after_unwrap", []) == []
    if apart.code >= 0:
        check_ended_well(culprit)


@each(*on_each_rank("skips-step", cases.skips_step))
@pytest.mark.one_in(2)
def test_one_rank_skips_step_as_in_plain_ddp(scenario: Scenario, runs: Runs) -> None:
    for end in runs.of(scenario):
        assert (end.code, end.told.get("equal")) == (0, True), end.stderr
        check_ended_well(end)


@each(Scenario("catches-in-backward", cases.catches_in_backward))
def test_training_cannot_go_on_after_an_interrupted_backward(
    scenario: Scenario, runs: Runs
) -> None:
    for end in runs.of(scenario):
        assert end.told.get("error") in ("PluginError", "PeerLost"), end.stderr
        check_ended_well(end)


@each(
    *on_each_rank("skips-step-of-shard", cases.skips_step_of_shard, "step"),
    Scenario(
        "drops-a-gradient-of-shard", cases.skips_step_of_shard, (OTHER, "gradient"), world_size=3
    ),
)
@pytest.mark.one_in(3)
def test_one_rank_skips_a_step_that_others_wait_for(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    said = {
        "gradient": "a gradient was set to None",
        "step": "on one of them a step was left out",
    }[str(scenario.args[1])]
    for end in ends:
        check_told_of(end, {"MismatchError", "PeerLost"})
        assert "MismatchError" in (end.told["error"], *end.told["message"].split(": "))
        assert said in end.told["message"]
        assert end.told["state"]["error"] == "PluginError"


@each(*on_each_rank("goes-on", cases.goes_on_after_an_error))
@pytest.mark.one_in(2)
def test_the_error_stays_until_unwrap(scenario: Scenario, runs: Runs) -> None:
    died, other = culprit_and_other(scenario, runs)
    assert died.code == -9
    assert other.code == 0, other.stderr
    for attempt in ("forward", "step", "flush", "state", "unwrap"):
        told = other.told[attempt]
        assert (told["error"], told["ours"]) == ("PeerLost", True), attempt
    assert other.told["threads_after_unwrap"] == []
    assert other.told["trained_alone"]
    check_ended_well(other)
