"""With gradients in two halves, training is still that of plain DDP, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import scripts_optimizers as optimizers
import scripts_split as split
import soak_cases
from comparing import Script, cases, check, each, of
from ranks import Ranks


@cases(
    *each(split.norm_logged, split.BY),
    *of(
        split,
        """
        logged_by_rank_0_before_changes changed_out_of_sight norms_of_parts clipped_by_hand
        clipped_in_a_closure clipped_and_named_twice squares_kept
        each_clipped_by_itself norm_after_changes read_between_changes nonfinite_norm
        two_optimizers accumulated aliases_kept norms_inside_backward clipped_and_kept
        giant_and_unused
        """,
    ),
    *each(split.norm_of_kind, (1.0, 2.0, float("inf"))),
    *each(split.numbers_by_hand, (range(7), range(7, len(split.BY_HAND)))),
    # Infinite on one rank.
    *each(optimizers.grad_scaler, ("sgd_momentum", "adamw")),
)
@pytest.mark.one_in(3)
def test_script(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    figures = check(two_ranks, script, *args, split="on")
    assert {stats["order"] for stats in figures} == {"halves"}


@cases(*((script,) for script in soak_cases.scripts().values()))
@pytest.mark.one_in(12)
def test_any_script(two_ranks: Ranks, script: Script, args: list[Any]) -> None:
    check(two_ranks, script, mode="", split="on")


@pytest.mark.parametrize(
    ("ranks", "alone", "compression"),
    [
        ("two_ranks", True, "none"),
        ("two_ranks", False, "fp16"),
        ("three_ranks", False, "none"),
    ],
)
def test_what_cannot_go_in_halves_is_refused(
    request: pytest.FixtureRequest, ranks: str, alone: bool, compression: str
) -> None:
    pool: Ranks = request.getfixturevalue(ranks)
    for said in pool.run(split.refused, alone, compression):
        assert said.startswith(
            "PluginError: split = 'on': gradients go in two halves between two ranks"
        )
