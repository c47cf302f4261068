"""What `bytesched run` does to scripts over a DistributedDataParallel that nobody has touched."""

from __future__ import annotations

import pytest
import run_cases
from ranks import run_fresh
from run_outcomes import SMALL, Outcomes, left, outcomes

pytestmark = pytest.mark.procs

#: case -> the mode of each optimizer that is wrapped at its end
MODES = {
    "optimizer_after_ddp": ["cross"],
    "optimizer_before_ddp": ["cross"],
    "mixed_by_all_to_alls": ["cross"],
    "mixed_by_functional_all_to_alls": ["cross"],
    "two_models": ["cross", "cross"],
    "two_models_of_one_optimizer": ["cross"],
    "two_optimizers": ["cross", "cross"],
    "another_optimizer_is_never_used": ["cross"],
    "a_new_optimizer_in_the_middle": ["cross"],
    "one_of_two_optimizers_is_replaced": ["cross", "cross"],
    "optimizers_take_turns": ["cross"],
    "ddp_made_again": ["cross"],
    "optimizer_inside_an_optimizer": ["backward"],
    "proxy_of_an_optimizer": ["cross"],
    "forward_inside_step": ["cross"],
    "lookahead": ["cross"],
    "wrap_fails": [],
    "first_forward_in_no_sync": ["cross"],
    "evaluated_counted_and_copied": ["cross"],
    "compiled_later": ["cross"],
    "compiled_as_a_function": [],
    "optimizer_compiled": [],
    "wrapped_by_the_script": ["cross"],
    "wrapped_late_by_the_script": ["cross"],
    "declined_by_the_script": [],
    "sparse_gradients": [],
    "special_parameters": [],
    "inside_join": [],
    "stepped_inside_backward": [],
    "never_trained": [],
    "no_ddp": [],
    "second_optimizer_begins_later": ["cross", "cross"],
    "slow_first_step": ["cross"],
    "state_made_by_one_rank": ["cross"],
    "one_rank_steps_before": [],
    "one_rank_has_other_settings": [],
    "one_rank_leaves_it": [],
    "wrap_fails_on_one_rank": [],
    "around_ddp_everywhere": ["cross"],
    "around_ddp_on_one_rank": ["cross"],
    "frozen_when_wrapped": ["cross"],
    "shared_encoder": ["cross", "cross"],
    "put_into_a_new_ddp": ["cross"],
    "forward_called_by_name": ["cross"],
    "hook_registered_later": ["plain"],
    "dropped": [],
}
#: case -> what is said, once, about a model that is left as it was
REASONS = {
    "compiled_as_a_function": "nothing calls it outside compiled code",
    "declined_by_the_script": "enabled is off",
    "two_models_of_one_optimizer": "this AdamW is already wrapped, with another model",
    "sparse_gradients": "has sparse gradients",
    "special_parameters": "is a Special, not a plain Parameter",
    "inside_join": "join()",
    "stepped_inside_backward": "steps inside the backward pass",
    "optimizer_compiled": "no step() of an optimizer",
    "wrap_fails": "ZeroDivisionError: no hooks here",
    "never_trained": "no step() of an optimizer",
    # Which of two it is depends on who is faster.
    "one_rank_steps_before": "the same ",
    "one_rank_has_other_settings": "rank 1 has \"policy = 'fifo'\"",
    "one_rank_leaves_it": "a communication hook is registered on the DDP module",
    "wrap_fails_on_one_rank": "rank 1 does not wrap: AttributeError: no such hook",
}


@pytest.fixture(scope="module")
def both_ranks() -> list[Outcomes]:
    names = list(run_cases.CASES)
    ranks = run_fresh(run_cases.run_all, timeout_s=100, env=SMALL, args=(names,))
    return [outcomes(rank) for rank in ranks]


@pytest.mark.parametrize("name", run_cases.CASES)
def test_trains_as_without(both_ranks: list[Outcomes], name: str) -> None:
    for rank, cases in enumerate(both_ranks):
        assert not cases[name]["different"], f"rank {rank}"
        assert cases[name]["modes"] == MODES[name]
    said, others = (cases[name]["said"] for cases in both_ranks)
    assert others == [] or name == "one_rank_steps_before"
    assert len(left(said)) == (name in REASONS)
    assert REASONS.get(name, "") in "".join(left(said))


def test_settings_of_the_script_come_first(both_ranks: list[Outcomes]) -> None:
    assert "policy fifo" in both_ranks[0]["wrapped_by_the_script"]["said"][-1]
    assert "policy priority" in both_ranks[0]["optimizer_after_ddp"]["said"][-1]


def test_world_of_one() -> None:
    (rank,) = run_fresh(
        run_cases.run_all, world_size=1, args=(["two_models", "optimizer_after_ddp"],)
    )
    for case in outcomes(rank).values():
        assert (case["different"], case["modes"]) == ([], [])
        assert len(left(case["said"])) == 1
        assert "there is one rank" in case["said"][0]


@pytest.mark.parametrize("watched", [0, 1])
def test_all_stay_plain_beside_a_rank_that_is_not_watched(watched: int) -> None:
    ranks = run_fresh(run_cases.run_some, args=("optimizer_after_ddp", [watched]))
    for rank in ranks:
        (case,) = outcomes(rank).values()
        assert (case["different"], case["modes"]) == ([], [])
    (case,) = outcomes(ranks[watched]).values()
    # Also where rank 0 has nothing to say.
    (line,) = left(case["said"])
    assert f"rank {1 - watched} takes no part: it does not run under bytesched" in line
