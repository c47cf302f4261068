"""Rows of chunks, summed and spread by collectives: the numbers are those of plain DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rows_scripts
import scripts_gradients as gradients
import scripts_optimizers as optimizers
import scripts_shard as shard
import scripts_split as split
import scripts_untaken as unstepped
from comparing import named
from ranks import Ranks, address_of


def check(
    ranks: Ranks, script: Callable[..., None], *args: Any, rtol: float = 0.0, **options: Any
) -> set[Any]:
    """The orders that the ranks had at the end, after their numbers were found equal."""
    outcomes = ranks.run(rows_scripts.by_collectives, address_of(script), args, options, rtol)
    for rank, (found, _) in enumerate(outcomes):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
    return {stats["order"] for _, stats in outcomes}


@named(
    split.norm_logged_by_rank_0_before_a_barrier,
    split.clipped_on_the_wire,
    gradients.no_sync,
    gradients.gradients_read,
    shard.read_when_its_owner_has_gone_on,
    shard.norms_asked_when_another_has_ended,
    shard.unwrapped_before_step,
    shard.loaded_elsewhere,
    shard.cut_and_clipped,
    shard.rounded_beside_complex,
    shard.written_before_its_neighbour_is_updated,
    shard.stepped_again_before_its_neighbour_is_updated,
    shard.adversaries,
    unstepped.unused_in_between,
    unstepped.some_taken_later,
    unstepped.kept_and_not_read,
    optimizers.two_steps_in_a_row,
    optimizers.step_every_other_backward,
    optimizers.muon,
)
def test_sharded(two_ranks: Ranks, script: Callable[..., None]) -> None:
    assert check(two_ranks, script, shard=True) == {"rows"}


@named(split.norm_after_changes, gradients.clip_value)
def test_three_ranks(three_ranks: Ranks, script: Callable[..., None]) -> None:
    assert check(three_ranks, script, rtol=1e-5, shard=True) == {"rows"}
