"""What `bytesched run` does to scripts over a DistributedDataParallel that nobody has touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import run_cases as scripts
import scripts_gradients as gradients
import scripts_models as models
import scripts_optimizers as optimizers
import scripts_rounds as rounds
from ranks import address_of, run_fresh
from run_outcomes import SMALL, Outcomes, left, outcomes, selected

pytestmark = pytest.mark.procs


class Row(NamedTuple):
    """A script and what comes of it."""

    case: Callable[..., None]
    #: of each optimizer that is wrapped at its end
    modes: Sequence[str] = ("cross",)
    #: of a model that is left as it was
    said: str = ""
    args: tuple[Any, ...] = ()


BOTH = ("cross", "cross")
CASES: dict[str, Row] = {
    "-".join([row.case.__name__, *map(str, row.args)]): row
    for row in (
        Row(optimizers.one_optimizer, args=("adamw",)),
        Row(scripts.optimizer_before_ddp, args=(1,)),
        Row(scripts.optimizer_before_ddp, args=(2,)),
        Row(scripts.mixed_by_all_to_alls, args=(False,)),
        Row(scripts.mixed_by_all_to_alls, args=(True,)),
        Row(scripts.two_models, BOTH, args=(False,)),
        Row(scripts.two_models, said="this AdamW is already wrapped, with another", args=(True,)),
        *(Row(scripts.two_optimizers, BOTH, args=(what,)) for what in ("", "replaced", "late")),
        *(Row(scripts.optimizers_in_turn, args=(turns,)) for turns in ((1,), (0, 1), (0, 1, 0, 1))),
        Row(scripts.optimizer_inside_an_optimizer, ["backward"]),
        Row(optimizers.delegating),
        Row(optimizers.closure),
        Row(scripts.lookahead),
        Row(scripts.another_optimizer_has_raised),
        Row(scripts.wrap_fails, [], "ZeroDivisionError: no hooks here"),
        Row(gradients.no_sync),
        Row(scripts.evaluated_counted_and_copied),
        Row(scripts.compiled_later),
        Row(scripts.compiled_as_a_function, [], "nothing calls it outside compiled code"),
        Row(scripts.optimizer_compiled, [], "no step() of an optimizer"),
        Row(scripts.wrapped_by_the_script, args=("", {"policy": "fifo"})),
        Row(scripts.wrapped_by_the_script, args=("late", {})),
        Row(scripts.wrapped_by_the_script, [], "enabled is off", ("", {"enabled": False})),
        Row(models.sparse_gradients, [], "has sparse gradients"),
        Row(scripts.special_parameters, [], "is a Special, not a plain Parameter"),
        Row(scripts.inside_join, [], "join()"),
        Row(scripts.stepped_inside_backward, [], "steps inside the backward pass"),
        Row(scripts.never_trained, [], "no step() of an optimizer"),
        Row(scripts.no_ddp, []),
        Row(scripts.slow_first_step),
        Row(scripts.state_made_by_one_rank),
        *(
            Row(scripts.one_rank_differs, [], said, (how,))
            for how, said in (
                # Which of two it is depends on who is faster.
                ("steps before", "the same "),
                ("settings", "rank 1 has \"policy = 'fifo'\""),
                ("hook", "a communication hook is registered on the DDP module"),
                ("late", "rank 1 does not wrap: AttributeError: no such hook"),
            )
        ),
        Row(rounds.probed_everywhere),
        Row(rounds.attacked),
        Row(rounds.probed_on_one_rank, args=(True,)),
        Row(rounds.frozen, args=(True, "later")),
        Row(rounds.shared_encoder, BOTH, args=("by one",)),
        Row(rounds.rewrapped, args=("kept",)),
        Row(rounds.forward_called, args=(True,)),
        Row(rounds.hook_registered, ["plain"], args=("python", 4)),
        Row(scripts.dropped, []),
    )
}


#: whose settings are looked at
WITH_SETTINGS = ("wrapped_by_the_script--{'policy': 'fifo'}", "one_optimizer-adamw")


def addressed(*names: str) -> dict[str, tuple[tuple[str, str], tuple[Any, ...]]]:
    """Where cases are, and what they are given."""
    return {name: (address_of(CASES[name].case), CASES[name].args) for name in names}


@pytest.fixture(scope="module")
def both_ranks(request: pytest.FixtureRequest) -> list[Outcomes]:
    """Of the cases that the selected tests are about."""
    cases = addressed(*selected(request, CASES, WITH_SETTINGS))
    ranks = run_fresh(scripts.run_all, timeout_s=100, env=SMALL, args=(cases,))
    return [outcomes(rank) for rank in ranks]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(2)
def test_trains_as_without(both_ranks: list[Outcomes], name: str) -> None:
    row = CASES[name]
    for rank, cases in enumerate(both_ranks):
        assert not cases[name]["different"], f"rank {rank}"
        assert cases[name]["modes"] == list(row.modes)
    said, others = (cases[name]["said"] for cases in both_ranks)
    assert others == [] or name == "one_rank_differs-steps before"
    assert len(left(said)) == bool(row.said)
    assert row.said in "".join(left(said))


def test_settings_of_the_script_come_first(both_ranks: list[Outcomes]) -> None:
    said = [both_ranks[0][name]["said"][-1] for name in WITH_SETTINGS]
    assert "policy fifo" in said[0]
    assert "policy priority" in said[1]


def test_world_of_one() -> None:
    (rank,) = run_fresh(
        scripts.run_all, world_size=1, args=(addressed("two_models-False", "one_optimizer-adamw"),)
    )
    for name, case in outcomes(rank).items():
        assert (case["different"], case["modes"]) == ([], [])
        assert len(left(case["said"])) == (2 if "two_models" in name else 1)
        assert "there is one rank" in case["said"][0]


@pytest.mark.parametrize("watched", [0, 1])
@pytest.mark.one_in(2)
def test_all_stay_plain_beside_a_rank_that_is_not_watched(watched: int) -> None:
    ranks = run_fresh(scripts.run_all, args=(addressed("one_optimizer-adamw"), [watched]))
    for rank in ranks:
        (case,) = outcomes(rank).values()
        assert (case["different"], case["modes"]) == ([], [])
    (case,) = outcomes(ranks[watched]).values()
    # Also where rank 0 has nothing to say.
    (line,) = left(case["said"])
    assert f"rank {1 - watched} takes no part: it does not run under bytesched" in line
