"""The interpreter ends with an update outstanding: nothing is lost, nothing hangs, no lie."""

from __future__ import annotations

import faults_exit_cases as cases
import pytest
from faults_cases import NO_TIMEOUT_S, TIMEOUT_S
from faults_fixtures import PROMPTLY_S, check_ended_well, check_told_of, selected
from faults_runner import Runs, Scenario

runs = pytest.fixture(scope="module")(selected)
pytestmark = pytest.mark.procs


def each(*scenarios: Scenario) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", scenarios, ids=lambda scenario: scenario.name)


CODES = {"falls-off": 0, "destroys-group": 0, "sys-exit": 3, "sigterm-handler": 143}


@each(
    *(Scenario(end, cases.leaves_with_an_update_outstanding, (end, NO_TIMEOUT_S)) for end in CODES)
)
def test_the_last_update_is_in_a_checkpoint_saved_at_exit(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    assert ends[0].told["outstanding"]
    for end in ends:
        assert end.code == CODES[scenario.name], end.stderr
        assert (end.told["equal"], end.told["values"]) == (True, 16)
        assert "error" not in end.stderr
        check_ended_well(end)


@each(Scenario("last-update-lost", cases.last_update_is_lost, (NO_TIMEOUT_S,)))
def test_a_checkpoint_without_the_last_update_cannot_be_saved(
    scenario: Scenario, runs: Runs
) -> None:
    survivor, died = runs.of(scenario)
    assert died.code == -9
    assert survivor.told["checkpoint"]["error"] == "PeerLost"
    assert "the last step could not be applied" in survivor.stderr
    assert "PeerLost" in survivor.stderr
    check_ended_well(survivor)


@each(Scenario("interrupted", cases.interrupted_at_a_gate, (NO_TIMEOUT_S,)))
def test_interrupted_at_a_gate(scenario: Scenario, runs: Runs) -> None:
    interrupted, other = runs.of(scenario)
    assert (interrupted.code, interrupted.told.get("error")) == (-2, "KeyboardInterrupt")
    assert interrupted.told["at"] - other.told["fault_at"] < PROMPTLY_S
    check_ended_well(interrupted)
    check_told_of(other, other, {"PeerLost"}, PROMPTLY_S)
    assert "rank 0 said: KeyboardInterrupt" in other.told["message"]


@each(Scenario("fork", cases.forks_with_an_update_outstanding, (NO_TIMEOUT_S,)))
def test_a_forked_child_ends(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    assert ends[0].told.get("child_code") == 5, ends[0].stderr
    for end in ends:
        assert end.code == 0, end.stderr
        check_ended_well(end)


@each(Scenario("pause", cases.pauses, (NO_TIMEOUT_S,)))
def test_a_pause_is_no_fault(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    assert ends[0].told.get("stopped"), ends[0].stderr
    for end in ends:
        assert (end.code, end.told["equal"]) == (0, True), end.stderr
        check_ended_well(end)


@each(Scenario("store-stopped", cases.store_is_stopped, (TIMEOUT_S,)))
def test_the_server_of_the_store_is_stopped(scenario: Scenario, runs: Runs) -> None:
    stopped, survivor = runs.of(scenario)
    assert stopped.stopped
    assert survivor.told.get("error") == "SchedulerTimeout", survivor.stderr
    assert survivor.told["at"] - stopped.told["fault_at"] < TIMEOUT_S + PROMPTLY_S
    assert survivor.code == 1
    assert not survivor.hung
    # A question to the store has no deadline: the thread that asks it is given up.
    assert set(survivor.told["threads_left"]) <= {"bytesched-notes"}
