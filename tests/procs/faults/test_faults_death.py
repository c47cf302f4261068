"""A rank dies, stops or raises at an exact moment: the other one says so, at once or in time."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import pytest
from faults_cases import (
    FAULT_STEP,
    NO_TIMEOUT_S,
    TIMEOUT_S,
    fails_in_an_answer,
    train_until_fault,
)
from faults_fixtures import check_ended_well, check_told_of, check_trace, selected
from faults_runner import Runs, Scenario

runs = pytest.fixture(scope="module")(selected)
pytestmark = pytest.mark.procs

FIRST, OTHER = 0, 1
MOMENTS = ("before_backward", "in_backward", "after_backward", "after_step", "in_next_forward")


def scenario(
    victim: int,
    moment: str,
    fault: str,
    timeout_s: float = NO_TIMEOUT_S,
    *,
    fault_step: int = FAULT_STEP,
    suffix: str = "",
    fields: Mapping[str, object] | None = None,
    **about: Any,
) -> Scenario:
    name = f"{fault}-{'rank1' if victim else 'rank0'}-{moment}{suffix}"
    args = (victim, moment, fault, timeout_s, fault_step, dict(fields or {}))
    return Scenario(name, train_until_fault, args, **about)


def each(scenarios: list[Scenario], more: list[Scenario] | None = None) -> pytest.MarkDecorator:
    """A test for each; ``more`` are not tried with every change."""
    nightly = [pytest.param(one, marks=pytest.mark.nightly) for one in more or ()]
    return pytest.mark.parametrize(
        "scenario", [*scenarios, *nightly], ids=lambda scenario: scenario.name
    )


KILLED = [
    scenario(victim, moment, "kill")
    for moment in (*MOMENTS, "in_update")
    for victim in (FIRST, OTHER)
]
# Where `timeout_s` must help.
STOPPED = [
    scenario(victim, moment, "stop", TIMEOUT_S) for moment in MOMENTS for victim in (FIRST, OTHER)
]
# The moment is where the two ranks race most.
AGAIN = [
    scenario(victim, "in_backward", "kill", suffix=f"-{number}")
    for number in range(5)
    for victim in (FIRST, OTHER)
]
CHOSEN = {"partition_bytes": 0, "credit_bytes": 0, "tune": True}
IN_WARM_UP = [
    scenario(FIRST, "in_backward", "kill", fault_step=0, suffix="-of-the-warm-up"),
    scenario(OTHER, "in_backward", "kill", fault_step=0, suffix="-of-the-warm-up"),
    scenario(FIRST, "in_measurement", "kill", fault_step=0, fields=CHOSEN),
    scenario(OTHER, "before_backward", "stop", TIMEOUT_S, fault_step=0, suffix="-of-warm-up"),
]
# Once a plan is followed.
PLANNED: dict[str, Any] = {"fault_step": 8}
WHEN_PLANNED = [
    scenario(FIRST, "in_backward", "kill", suffix="-when-planned", **PLANNED),
    scenario(OTHER, "in_backward", "stop", TIMEOUT_S, suffix="-when-planned", **PLANNED),
]
SPLIT: dict[str, Any] = {"suffix": "-of-split", "fields": {"split": "on"}}
IN_SPLIT = [
    *(scenario(FIRST, moment, "kill", **SPLIT) for moment in MOMENTS),
    scenario(OTHER, "in_backward", "kill", **SPLIT),
    scenario(OTHER, "in_backward", "stop", TIMEOUT_S, **SPLIT),
    scenario(FIRST, "after_step", "stop", TIMEOUT_S, **SPLIT),
]
SHARD: dict[str, Any] = {"suffix": "-of-shard", "fields": {"shard": True}}
IN_SHARD = [
    *(scenario(FIRST, moment, "kill", **SHARD) for moment in MOMENTS),
    scenario(OTHER, "in_backward", "kill", **SHARD),
    scenario(OTHER, "after_step", "kill", **SHARD),
    scenario(OTHER, "in_backward", "stop", TIMEOUT_S, **SHARD),
    scenario(FIRST, "after_step", "stop", TIMEOUT_S, **SHARD),
]
ANSWERING = [
    Scenario(f"{fault}-in-an-answer", fails_in_an_answer, (OTHER, fault, timeout_s))
    for fault, timeout_s in (("kill", NO_TIMEOUT_S), ("stop", TIMEOUT_S), ("raise", NO_TIMEOUT_S))
]
RAISED = [
    scenario(FIRST, "in_next_forward", "raise"),
    scenario(OTHER, "in_next_forward", "raise"),
    scenario(FIRST, "in_backward", "raise"),
    scenario(OTHER, "in_backward", "raise"),
    scenario(FIRST, "in_gradient_hook", "raise"),
    scenario(OTHER, "in_module_hook", "raise"),
    scenario(FIRST, "after_backward", "raise"),
    scenario(OTHER, "in_step_hook", "raise"),
    scenario(FIRST, "in_update", "raise"),
    scenario(OTHER, "in_update", "raise"),
    scenario(OTHER, "in_backward", "raise", fault_step=0, suffix="-of-the-warm-up"),
]
ENDED = {
    "exit": ("SystemExit", 3),
    "interrupt": ("KeyboardInterrupt", -2),
    "terminate": (None, -15),
}
EXITED = [
    scenario(victim, moment, fault)
    for fault in ENDED
    for victim, moment in ((FIRST, "in_backward"), (OTHER, "after_step"))
]
# Where others wait for its parameters, which nothing but its word tells them.
EXITED_OF_SHARD = [
    scenario(OTHER, "after_backward", "exit", world_size=3, **SHARD),
    scenario(FIRST, "after_backward", "exit", **SHARD),
    scenario(OTHER, "after_backward", "raise", **SHARD),
]


@each(KILLED, AGAIN)
@pytest.mark.one_in(5)
def test_killed(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    victim = scenario.args[0]
    died, survivor = ends if victim == FIRST else reversed(ends)
    assert died.code == -9
    assert not died.hung, died.stderr
    check_trace(died)
    check_told_of(survivor, {"PeerLost"})


@each(STOPPED)
@pytest.mark.one_in(7)
def test_stopped(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    victim = scenario.args[0]
    stopped, survivor = ends if victim == FIRST else reversed(ends)
    assert stopped.stopped
    check_trace(stopped)
    check_told_of(survivor, {"SchedulerTimeout"})


@each([scenario(OTHER, "in_backward", "kill", suffix="-of-three", world_size=3)])
def test_every_survivor_is_told(scenario: Scenario, runs: Runs) -> None:
    """Also a rank that was not talking to the dead one: the first to notice breaks its links."""
    first, _, other = runs.of(scenario)
    for survivor in (first, other):
        check_told_of(survivor, {"PeerLost"})
        assert f"rank 1 on {socket.gethostname()} is gone" in survivor.stderr


@each([scenario(FIRST, "in_backward", "stop", TIMEOUT_S, suffix="-continued", continues=True)])
def test_a_stopped_rank_that_goes_on_is_told(scenario: Scenario, runs: Runs) -> None:
    late, survivor = runs.of(scenario)
    assert late.stopped
    check_told_of(survivor, {"SchedulerTimeout"})
    check_told_of(late, {"PeerLost", "SchedulerTimeout"})
    assert "rank 1 said: SchedulerTimeout" in late.told["message"]


def check_dies(scenario: Scenario, runs: Runs, order: str) -> None:
    ends = runs.of(scenario)
    victim, _, fault, *_ = scenario.args
    died, survivor = ends if victim == FIRST else reversed(ends)
    expected = {"kill": "PeerLost", "stop": "SchedulerTimeout"}[str(fault)]
    check_told_of(survivor, {expected})
    assert died.told["order"] == order


@each(IN_WARM_UP + WHEN_PLANNED)
@pytest.mark.one_in(5)
def test_dies_in_warm_up_or_when_an_order_is_planned(scenario: Scenario, runs: Runs) -> None:
    check_dies(scenario, runs, "planned")


@each(IN_SPLIT)
@pytest.mark.one_in(3)
def test_dies_where_all_reduces_are_split(scenario: Scenario, runs: Runs) -> None:
    check_dies(scenario, runs, "halves")


@each(IN_SHARD)
@pytest.mark.one_in(4)
def test_dies_where_all_reduces_are_shard(scenario: Scenario, runs: Runs) -> None:
    check_dies(scenario, runs, "owners")


@each(ANSWERING)
def test_fails_while_it_answers_for_its_state(scenario: Scenario, runs: Runs) -> None:
    """Its part of a state dict that another rank wants, which waits for nothing else."""
    survivor = runs.of(scenario)[FIRST]
    expected = "SchedulerTimeout" if scenario.args[1] == "stop" else "PeerLost"
    check_told_of(survivor, {expected})
    if scenario.args[1] == "raise":
        assert "rank 1 said: ValueError: boom" in survivor.told["message"]


@each(RAISED)
@pytest.mark.one_in(5)
def test_raises(scenario: Scenario, runs: Runs) -> None:
    """The user's own exception goes its way on one rank, and the other repeats what it said."""
    ends = runs.of(scenario)
    victim = scenario.args[0]
    raised, survivor = ends if victim == FIRST else reversed(ends)
    assert (raised.code, raised.told["error"], raised.told["message"]) == (1, "ValueError", "boom")
    check_ended_well(raised)
    check_told_of(survivor, {"PeerLost"})
    assert f"rank {victim} said: ValueError: boom" in survivor.told["message"]


@each(EXITED)
@pytest.mark.one_in(2)
def test_ends_the_interpreter(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    victim, _, fault, *_ = scenario.args
    ended, survivor = ends if victim == FIRST else reversed(ends)
    error, code = ENDED[str(fault)]
    assert (ended.code, ended.told.get("error")) == (code, error)
    if fault == "terminate":
        check_trace(ended)
    else:
        check_ended_well(ended)
    check_told_of(survivor, {"PeerLost"})


@each(EXITED_OF_SHARD)
def test_ends_before_a_step_that_others_wait_for(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    fault = scenario.args[2]
    victim = int(str(scenario.args[0]))
    ended = ends.pop(victim)
    assert ended.code == (3 if fault == "exit" else 1)
    check_ended_well(ended)
    for survivor in ends:
        check_told_of(survivor, {"PeerLost"})
        if fault == "exit":
            assert f"rank {victim} has ended its training after" in survivor.told["message"]
