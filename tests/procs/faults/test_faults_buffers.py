"""A model with buffers, which DDP broadcasts in the forward pass: a fault there has a name too."""

from __future__ import annotations

import pytest
from faults_cases import FAULT_STEP, NO_TIMEOUT_S, TIMEOUT_S, train_until_fault
from faults_fixtures import check_told_of, selected
from faults_runner import Runs, Scenario

runs = pytest.fixture(scope="module")(selected)
pytestmark = pytest.mark.procs

ERRORS = {"kill": "PeerLost", "stop": "SchedulerTimeout"}
SCENARIOS = [
    Scenario(
        f"{fault}-rank{victim}-{moment}",
        train_until_fault,
        (victim, moment, fault, timeout_s, FAULT_STEP, {}, True),
    )
    for fault, timeout_s in (("kill", NO_TIMEOUT_S), ("stop", TIMEOUT_S))
    for victim in (0, 1)
    # Nothing of ours is outstanding after the second.
    for moment in ("before_backward", "after_last_update")
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.one_in(4)
def test_fault_in_front_of_a_broadcast(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    victim, _, fault, *_ = scenario.args
    survivor = ends[1 - int(str(victim))]
    check_told_of(survivor, {ERRORS[str(fault)]})
