"""A rank dies, stops, raises or ends at an exact moment: the others say so, at once or in time."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faults_cases import (
    FAULT_STEP,
    fails_in_a_section,
    fails_in_a_turn_of_ddp,
    fails_in_an_answer,
    train_until_fault,
)
from faults_fixtures import check_ended_well, check_told_of, check_trace, selected
from faults_runner import RankEnd, Runs, Scenario

runs = pytest.fixture(scope="module")(selected)

#: what befalls a rank -> its exit code, the error that it tells, and that of the others
FAULTS = {
    "kill": (-9, None, "PeerLost"),
    "stop": (-9, None, "SchedulerTimeout"),
    "raise": (1, "ValueError", "PeerLost"),
    "exit": (3, "SystemExit", "PeerLost"),
    "interrupt": (-2, "KeyboardInterrupt", "PeerLost"),
    "terminate": (-15, None, "PeerLost"),
}
MOMENTS = ("before_backward", "in_backward", "after_backward", "after_step", "in_next_forward")
FIRST, OTHER, BOTH = (0,), (1,), (0, 1)


def each(
    fault: str,
    victims: tuple[int, ...],
    *moments: str,
    of: str = "",
    step: int = FAULT_STEP,
    buffers: bool = False,
    world_size: int = 2,
    continues: bool = False,
    **fields: Any,
) -> Iterator[Scenario]:
    """One scenario for each moment and victim, named also after what it is ``of``."""
    for moment in moments:
        for victim in victims:
            yield Scenario(
                f"{fault}-rank{victim}-{moment}{of and '-of-'}{of}",
                train_until_fault,
                (victim, fault, moment, step, fields, buffers),
                world_size=world_size,
                continues=continues,
            )


def elsewhere(case: Callable[..., None], fault: str, *victims: int) -> Iterator[Scenario]:
    for victim in victims:
        yield Scenario(f"{fault}-rank{victim}-{case.__name__}", case, (victim, fault))


CHOSEN: dict[str, Any] = {"partition_bytes": 0, "credit_bytes": 0, "tune": True}
SPLIT: dict[str, Any] = {"of": "split", "split": "on"}
SHARD: dict[str, Any] = {"of": "shard", "shard": True}
#: in the second step of the script, a plan is followed
PLANNED: dict[str, Any] = {"of": "a-plan", "step": 8}
#: which DDP broadcasts in the forward pass; nothing of ours is outstanding after the last update
BUFFERS: dict[str, Any] = {"of": "buffers", "buffers": True}
SCENARIOS = [
    *each("kill", BOTH, *MOMENTS, "in_update"),
    # Where `timeout_s` must help.
    *each("stop", BOTH, *MOMENTS),
    # The moment is where the two ranks race most.
    *(one for number in range(5) for one in each("kill", BOTH, "in_backward", of=f"race{number}")),
    *each("kill", BOTH, "in_backward", step=0, of="warm-up"),
    *each("kill", FIRST, "in_measurement", step=0, **CHOSEN),
    *each("stop", OTHER, "before_backward", step=0, of="warm-up"),
    *each("kill", FIRST, "in_backward", **PLANNED),
    *each("stop", OTHER, "in_backward", **PLANNED),
    *each("kill", FIRST, *MOMENTS, **SPLIT),
    *each("kill", OTHER, "in_backward", **SPLIT),
    *each("stop", OTHER, "in_backward", **SPLIT),
    *each("stop", FIRST, "after_step", **SPLIT),
    *each("kill", FIRST, *MOMENTS, **SHARD),
    *each("kill", OTHER, "in_backward", "after_step", **SHARD),
    *each("stop", OTHER, "in_backward", **SHARD),
    *each("stop", FIRST, "after_step", **SHARD),
    *each("raise", BOTH, "in_next_forward", "in_backward", "in_update"),
    *each("raise", FIRST, "in_gradient_hook", "after_backward"),
    *each("raise", OTHER, "in_module_hook", "in_step_hook"),
    *each("raise", OTHER, "in_backward", step=0, of="warm-up"),
    *(
        one
        for fault in ("exit", "interrupt", "terminate")
        for victim, moment in ((FIRST, "in_backward"), (OTHER, "after_step"))
        for one in each(fault, victim, moment)
    ),
    *each("kill", BOTH, "before_backward", "after_last_update", **BUFFERS),
    *each("stop", BOTH, "before_backward", "after_last_update", **BUFFERS),
    # Others wait for its parameters, which nothing but its word tells them.
    *each("exit", OTHER, "after_backward", world_size=3, **SHARD),
    *each("exit", FIRST, "after_backward", **SHARD),
    *each("raise", OTHER, "after_backward", **SHARD),
    # Also a rank that was not talking to the dead one: the first to notice breaks its links.
    *each("kill", OTHER, "in_backward", of="three", world_size=3),
]
ELSEWHERE = [
    *elsewhere(fails_in_an_answer, "kill", 1),
    *elsewhere(fails_in_an_answer, "stop", 1),
    *elsewhere(fails_in_an_answer, "raise", 1),
    *elsewhere(fails_in_a_section, "kill", 0, 1),
    *elsewhere(fails_in_a_section, "stop", 0, 1),
]


def check_survivors(scenario: Scenario, ends: list[RankEnd]) -> RankEnd:
    """All but the victim, whose end is returned."""
    victim, fault, *_ = scenario.args
    ended = ends.pop(int(str(victim)))
    for survivor in ends:
        check_told_of(survivor, {FAULTS[str(fault)][2]})
        if fault == "raise":
            assert f"rank {victim} said: ValueError: boom" in survivor.told["message"]
    return ended


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.one_in(4)
def test_fault_in_training(scenario: Scenario, runs: Runs) -> None:
    ends = runs.of(scenario)
    ended = check_survivors(scenario, ends)
    victim, fault, _, _, fields, _ = scenario.args
    assert isinstance(fields, dict)
    code, error, _ = FAULTS[str(fault)]
    assert (ended.code, ended.told.get("error")) == (code, error), ended.stderr
    assert ended.stopped == (fault == "stop")
    if error is None:
        assert not ended.hung, ended.stderr
        check_trace(ended)
    else:
        # The user's own exception goes its way.
        assert fault != "raise" or ended.told["message"] == "boom"
        check_ended_well(ended)
    order = "owners" if "shard" in fields else "halves" if "split" in fields else "planned"
    assert ended.told["order"] == order
    for survivor in ends:
        if len(ends) == 2 and fault == "kill":
            assert f"rank 1 on {socket.gethostname()} is gone" in survivor.stderr
        if fault == "exit" and "shard" in fields:
            assert f"rank {victim} has ended its training after" in survivor.told["message"]


@pytest.mark.parametrize("scenario", ELSEWHERE, ids=lambda scenario: scenario.name)
@pytest.mark.one_in(2)
def test_fault_elsewhere(scenario: Scenario, runs: Runs) -> None:
    """Where a rank answers for its part of a state dict, and in an urgent section."""
    check_survivors(scenario, runs.of(scenario))


@pytest.mark.parametrize("scenario", elsewhere(fails_in_a_turn_of_ddp, "kill", *OTHER))
def test_the_error_in_a_turn_of_ddp_is_its_own(scenario: Scenario, runs: Runs) -> None:
    survivor, _ = runs.of(scenario)
    assert survivor.told["error"] == "RuntimeError", survivor.stderr
    assert "by peer" in survivor.told["message"]
    check_ended_well(survivor)


@pytest.mark.parametrize(
    "scenario", each("stop", FIRST, "in_backward", of="a-while", continues=True)
)
def test_a_stopped_rank_that_goes_on_is_told(scenario: Scenario, runs: Runs) -> None:
    late, survivor = runs.of(scenario)
    assert late.stopped
    check_told_of(survivor, {"SchedulerTimeout"})
    check_told_of(late, {"PeerLost", "SchedulerTimeout"})
    assert "rank 1 said: SchedulerTimeout" in late.told["message"]
