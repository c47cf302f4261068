"""Blocks that are foreseen, in virtual time: fewer decisions, and no slower."""

from __future__ import annotations

import pytest
from simulated_iteration import SimulatedIteration, simulate

from bytesched.bench.profile import load_profile
from bytesched.link.bound import gradients
from bytesched.policy import Policy, Priority, Prophet

BYTES_PER_S = 118e6
PARTITION = 2**20


def iteration(
    name: str, ratio: float, policy: Policy, overhead_s: float, *, one_operation: bool = False
) -> SimulatedIteration:
    """The last of five; communication takes ``ratio`` times as long as compute."""
    profile = load_profile(name)
    profile = profile.scaled(profile.nbytes / BYTES_PER_S / (profile.compute_s * ratio))
    chain = profile.chain()
    work = gradients(chain)
    return simulate(
        [gradient.release_s for gradient in work],
        [int(gradient.nbytes) for gradient in work],
        [layer.forward_s for layer in chain],
        bytes_per_s=BYTES_PER_S,
        overhead_s=overhead_s,
        partition_bytes=PARTITION,
        credit_bytes=2 * PARTITION,
        policy=policy,
        merge=True,
        iterations=5,
        one_operation=one_operation,
    )


def decisions(simulated: SimulatedIteration) -> int:
    """Moments at which something was started."""
    return len({at_s for at_s, _ in simulated.starts})


@pytest.mark.parametrize("overhead_s", [0.0, 3e-4, 1e-3])
@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("name", ["gpt", "vgg", "resnet"])
def test_blocks_take_fewer_decisions_and_no_more_time(
    name: str, ratio: float, overhead_s: float
) -> None:
    priority = iteration(name, ratio, Priority(), overhead_s)
    prophet = iteration(name, ratio, Prophet(), overhead_s)
    assert prophet.step_s <= 1.001 * priority.step_s
    assert decisions(prophet) < decisions(priority)
    assert {task.name for _, task in prophet.finishes} == {t.name for _, t in priority.finishes}


@pytest.mark.parametrize("name", ["gpt", "vgg", "resnet"])
def test_as_one_operation_blocks_are_faster_where_a_message_is_dear(name: str) -> None:
    priority = iteration(name, 1.0, Priority(), 1e-3)
    prophet = iteration(name, 1.0, Prophet(), 1e-3, one_operation=True)
    assert prophet.step_s < priority.step_s
