"""A rank dies, stops or raises while its session rests: the others say so, by name and in time."""

from __future__ import annotations

from typing import Any

import pytest
from faults_cases import NO_TIMEOUT_S, TIMEOUT_S
from faults_fixtures import check_ended_well, check_told_of, selected
from faults_runner import Runs, Scenario
from resting_cases import at_rest_until_fault

runs = pytest.fixture(scope="module")(selected)
pytestmark = pytest.mark.procs

LEADER, FOLLOWER = 0, 1
MOMENTS = ("before_backward", "in_backward", "after_backward", "after_step", "in_next_forward")


def scenario(
    victim: int,
    moment: str,
    fault: str,
    timeout_s: float = NO_TIMEOUT_S,
    *,
    suffix: str = "",
    **about: Any,
) -> Scenario:
    name = f"{fault}-{'follower' if victim else 'leader'}-{moment}{suffix}"
    return Scenario(name, at_rest_until_fault, (victim, moment, fault, timeout_s), **about)


def each(scenarios: list[Scenario]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", scenarios, ids=lambda scenario: scenario.name)


KILLED = [scenario(victim, moment, "kill") for moment in MOMENTS for victim in (LEADER, FOLLOWER)]
STOPPED = [
    scenario(FOLLOWER, "before_backward", "stop", TIMEOUT_S),
    scenario(LEADER, "in_backward", "stop", TIMEOUT_S),
    scenario(FOLLOWER, "after_step", "stop", TIMEOUT_S),
]
RAISED = [
    scenario(FOLLOWER, "in_backward", "raise"),
    scenario(LEADER, "in_gradient_hook", "raise"),
    scenario(FOLLOWER, "in_step_hook", "raise"),
    scenario(LEADER, "in_next_forward", "raise"),
]
EXITED = [scenario(LEADER, "in_backward", "exit"), scenario(FOLLOWER, "after_step", "interrupt")]
OF_THREE = [scenario(FOLLOWER, "in_backward", "kill", suffix="-of-three", world_size=3)]


@each(KILLED)
def test_killed(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    died, survivor = ends if scenario.args[0] == LEADER else reversed(ends)
    assert died.code == -9
    assert died.told["rested"], "the session was scheduled"
    check_told_of(survivor, {"PeerLost"}, traced=False)


@each(STOPPED)
def test_stopped(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    stopped, survivor = ends if scenario.args[0] == LEADER else reversed(ends)
    assert stopped.stopped
    assert stopped.told["rested"], "the session was scheduled"
    check_told_of(survivor, {"SchedulerTimeout"}, traced=False)


@each(RAISED)
def test_raises(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    victim = scenario.args[0]
    raised, survivor = ends if victim == LEADER else reversed(ends)
    assert (raised.code, raised.told["error"], raised.told["message"]) == (1, "ValueError", "boom")
    assert raised.told["rested"], "the session was scheduled"
    check_ended_well(raised, traced=False)
    check_told_of(survivor, {"PeerLost"}, traced=False)
    assert f"rank {victim} said: ValueError: boom" in survivor.told["message"]


@each(EXITED)
def test_ends_the_interpreter(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    ended, survivor = ends if scenario.args[0] == LEADER else reversed(ends)
    assert ended.told["rested"], "the session was scheduled"
    check_ended_well(ended, traced=False)
    check_told_of(survivor, {"PeerLost"}, traced=False)


@each(OF_THREE)
def test_every_survivor_is_told(scenario: Scenario, runs: Runs) -> None:
    leader, _, other = runs.of(scenario)
    for survivor in (leader, other):
        check_told_of(survivor, {"PeerLost"}, traced=False)
        assert "rank 1 on " in survivor.stderr
