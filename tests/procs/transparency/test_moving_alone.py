"""Views of gradients that torch cannot move together with them: training is that of plain DDP."""

from __future__ import annotations

from collections.abc import Callable

import alone_scripts
import scripts_gradients as gradients
import scripts_split as split
from comparing import named
from ranks import Ranks, address_of


@named(
    split.clipped_by_hand,
    split.changed_out_of_sight,
    split.aliases_kept,
    gradients.gradients_written_through_data,
    gradients.gradients_seen_through_views,
    gradients.gradients_replaced,
    gradients.gradients_read,
    gradients.gradients_referred_to,
    gradients.gradient_data_assigned,
    gradients.gradients_kept,
)
def test_views(two_ranks: Ranks, script: Callable[..., None]) -> None:
    options = {"module_alone": True}
    outcomes = two_ranks.run(alone_scripts.compare_alone, address_of(script), (), options, 0.0)
    for rank, (found, _) in enumerate(outcomes):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
