"""A session that rests and wakes all the time trains as plain DDP does, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import scripts_gradients as gradients
import scripts_models as models
import scripts_optimizers as optimizers
import scripts_reading as reading
from ranks import Ranks, address_of
from rested import RestedJob
from training import compare


def check(ranks: Ranks, script: Callable[..., None], *args: object, **options: object) -> int:
    """The script's values are those of plain DDP; how often its wrapped run has changed."""
    outcomes = ranks.run(compare, address_of(script), args, options, 0.0, RestedJob)
    for rank, (found, _) in enumerate(outcomes):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
    changes = {int(stats["changes"]) for _, stats in outcomes}
    assert len(changes) == 1
    return changes.pop()


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw_foreach", "adam_fused"])
def test_optimizer(two_ranks: Ranks, name: str) -> None:
    assert check(two_ranks, optimizers.one_optimizer, name) >= 3


@pytest.mark.parametrize(
    "name", ["tied", "attention", "batch_norm", "checkpoint_reentrant", "raw_kernel"]
)
def test_model(two_ranks: Ranks, name: str) -> None:
    assert check(two_ranks, models.one_model, name) >= 3


@pytest.mark.parametrize(
    "script",
    [
        optimizers.two_optimizers,
        optimizers.two_models,
        optimizers.closure,
        optimizers.lbfgs,
        optimizers.step_every_other_backward,
        optimizers.step_skipped,
        models.view_of_buckets,
        models.frozen_layer,
        models.autocast,
        gradients.no_sync,
        gradients.several_forwards_one_backward,
        gradients.clip_norm,
        gradients.clip_value,
        gradients.gradients_kept,
        gradients.gradients_read_after_step,
        gradients.gradients_scaled_in_place,
        gradients.gradients_replaced,
        gradients.two_losses,
        gradients.user_gradient_hooks,
        reading.weights_read,
        reading.averaged_model,
        reading.state_dicts,
        reading.saved,
        reading.resumed,
        reading.evaluated,
        reading.unwrapped_in_the_middle,
    ],
    ids=lambda script: script.__name__,
)
def test_script(two_ranks: Ranks, script: Callable[..., None]) -> None:
    assert check(two_ranks, script) >= 2
