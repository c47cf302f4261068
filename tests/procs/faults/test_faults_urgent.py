"""A rank dies or stops inside an urgent section: the others hear of it there, and hold nothing."""

from __future__ import annotations

import pytest
from faults_cases import NO_TIMEOUT_S, TIMEOUT_S, fails_in_a_section
from faults_fixtures import check_told_of, selected
from faults_runner import Runs, Scenario

runs = pytest.fixture(scope="module")(selected)
pytestmark = pytest.mark.procs

ERRORS = {"kill": "PeerLost", "stop": "SchedulerTimeout"}
SCENARIOS = [
    Scenario(f"{fault}-rank{victim}-in-a-section", fails_in_a_section, (victim, fault, timeout_s))
    for fault, timeout_s in (("kill", NO_TIMEOUT_S), ("stop", TIMEOUT_S))
    for victim in (0, 1)
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.one_in(4)
def test_fault_in_a_section(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    victim, fault, _ = scenario.args
    check_told_of(ends[1 - int(str(victim))], {ERRORS[str(fault)]})
