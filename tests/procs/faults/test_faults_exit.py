"""The interpreter ends with an update outstanding: nothing is lost, nothing hangs, no lie."""

from __future__ import annotations

import faults_exit_cases as cases
import pytest
from faults_fixtures import check_ended_well, check_told_of, selected
from faults_runner import Runs, Scenario
from ranks import run_fresh

runs = pytest.fixture(scope="module")(selected)


def each(*scenarios: Scenario) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", scenarios, ids=lambda scenario: scenario.name)


CODES = {"falls-off": 0, "destroys-group": 0, "sys-exit": 3, "sigterm-handler": 143}


@each(*(Scenario(end, cases.leaves_with_an_update_outstanding, (end,)) for end in CODES))
@pytest.mark.one_in(3)
def test_the_last_update_is_in_a_checkpoint_saved_at_exit(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    assert ends[0].told["outstanding"]
    for end in ends:
        assert end.code == CODES[scenario.name], end.stderr
        assert (end.told["equal"], end.told["values"]) == (True, 16)
        assert "error" not in end.stderr
        check_ended_well(end)


def test_a_rank_that_leaves_without_an_end_takes_no_gradient_with_it() -> None:
    plain, wrapped = (
        run_fresh(cases.rank_1_leaves_without_an_end, args=(wrapped,)) for wrapped in (False, True)
    )
    assert [rank.code for rank in (*plain, *wrapped)] == [0] * 4, wrapped
    assert wrapped[0].stdout == plain[0].stdout


@each(Scenario("is-lost", cases.leaves_with_an_update_outstanding, ("is-lost",)))
def test_a_checkpoint_without_the_last_update_cannot_be_saved(
    scenario: Scenario, runs: Runs
) -> None:
    survivor, died = runs.of(scenario)
    assert died.code == -9
    assert survivor.told["checkpoint"]["error"] == "PeerLost"
    assert survivor.code == 1
    assert "the last step could not be applied" in survivor.stderr
    assert "PeerLost" in survivor.stderr
    check_ended_well(survivor)


@each(Scenario("one-step-more", cases.takes_one_step_more))
def test_a_step_that_the_other_rank_does_not_take_is_a_failure(
    scenario: Scenario, runs: Runs
) -> None:
    other, alone = runs.of(scenario)
    assert (other.code, alone.code) == (0, 1), alone.stderr
    assert "the last step could not be applied" in alone.stderr


def test_the_last_step_of_ranks_in_children_of_multiprocessing() -> None:
    """They end without atexit; their parents read the weights, in shared memory."""
    ranks = [
        run_fresh(cases.trains_in_a_child, timeout_s=120.0, args=(wrapped,))
        for wrapped in (False, True)
    ]
    plain, wrapped = ([(rank.code, rank.stdout) for rank in run] for run in ranks)
    assert [code for code, _ in plain] == [0, 0]
    assert wrapped == plain, ranks[1][0].stderr


def test_a_lost_step_fails_a_child_of_multiprocessing() -> None:
    ranks = run_fresh(cases.child_takes_one_step_more, timeout_s=120.0)
    assert [rank.stdout.split() for rank in ranks] == [["0"], ["1"]], ranks[1].stderr


@each(Scenario("interrupted", cases.interrupted_at_a_gate))
def test_interrupted_at_a_gate(scenario: Scenario, runs: Runs) -> None:
    interrupted, other = runs.of(scenario)
    assert (interrupted.code, interrupted.told.get("error")) == (-2, "KeyboardInterrupt")
    check_ended_well(interrupted)
    check_told_of(other, {"PeerLost"})
    assert "rank 0 said: KeyboardInterrupt" in other.told["message"]


@each(Scenario("fork", cases.forks_with_an_update_outstanding))
def test_a_forked_child_ends(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    assert ends[0].told.get("child_code") == 5, ends[0].stderr
    assert ends[0].told["child_sum"] == ends[0].told["sum"]
    for end in ends:
        assert end.code == 0, end.stderr
        check_ended_well(end)


@each(Scenario("pause", cases.pauses))
def test_a_pause_is_no_fault(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    assert ends[0].told.get("stopped"), ends[0].stderr
    for end in ends:
        assert (end.code, end.told["equal"]) == (0, True), end.stderr
        check_ended_well(end)


@each(Scenario("store-stopped", cases.store_is_stopped))
def test_the_server_of_the_store_is_stopped(scenario: Scenario, runs: Runs) -> None:
    stopped, survivor = runs.of(scenario)
    assert stopped.stopped
    assert survivor.told.get("error") == "SchedulerTimeout", survivor.stderr
    assert survivor.code == 1
    assert not survivor.hung
    # A question to the store has no deadline: the thread that asks it is given up.
    assert set(survivor.told["threads_left"]) <= {"bytesched-notes"}
