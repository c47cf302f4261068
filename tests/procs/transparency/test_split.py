"""With gradients in two halves, training is still that of plain DDP, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import scripts_gradients as gradients
import scripts_models as models
import scripts_optimizers as optimizers
import scripts_split as split
from comparing import check, named
from ranks import Ranks


def check_split(ranks: Ranks, script: Callable[..., None], *args: object) -> None:
    figures = check(ranks, script, *args, split="on")
    assert {stats["order"] for stats in figures} == {"halves"}


@named(
    split.norm_only_logged,
    split.norm_logged_by_rank_0,
    split.norm_logged_by_rank_0_before_a_barrier,
    split.different_norms,
    split.logged_by_rank_0_before_changes,
    split.changed_out_of_sight,
    split.norms_of_rows,
    split.clipped_by_hand,
    split.clipped_in_a_closure,
    split.clipped_and_named_twice,
    split.parts_of_sums,
    split.squares_kept,
    split.each_clipped_by_itself,
    split.norm_after_changes,
    split.read_between_changes,
    split.nonfinite_norm,
    split.two_optimizers,
    split.accumulated,
    split.aliases_kept,
    split.norms_inside_backward,
    split.clipped_and_kept,
    split.giant_and_unused,
    gradients.clip_norm,
    gradients.clip_by_total_norm,
    gradients.clip_value,
    gradients.clip_some,
    gradients.gradients_scaled_in_place,
    gradients.gradients_written_through_data,
    gradients.gradients_replaced,
    gradients.gradients_dropped,
    gradients.gradients_read,
    gradients.gradients_kept,
    models.frozen_layer,
    optimizers.parameter_groups,
    optimizers.step_skipped,
)
@pytest.mark.one_in(3)
def test_script(two_ranks: Ranks, script: Callable[..., None]) -> None:
    check_split(two_ranks, script)


@pytest.mark.parametrize("kind", [1.0, 2.0, float("inf")])
def test_norms(two_ranks: Ranks, kind: float) -> None:
    check_split(two_ranks, split.norm_of_kind, kind)


@pytest.mark.parametrize("kinds", [range(7), range(7, len(split.BY_HAND))])
def test_numbers_by_hand(two_ranks: Ranks, kinds: range) -> None:
    check_split(two_ranks, split.numbers_by_hand, list(kinds))


@pytest.mark.parametrize("optimizer_of", ["sgd_momentum", "adamw"])
def test_infs_of_one_rank(two_ranks: Ranks, optimizer_of: str) -> None:
    check_split(two_ranks, optimizers.grad_scaler, optimizer_of)


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
