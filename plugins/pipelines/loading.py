"""A schedule of torch's that follows an order from a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from bytesched.errors import ConfigError, PluginError
from bytesched.pipeline.order import Order

__all__ = ["ordered_schedule"]


def ordered_schedule(
    stages: Sequence[Any],
    order: str | Path | Order,
    loss_fn: Callable[..., torch.Tensor],
    **arguments: Any,
) -> Any:
    """A schedule of torch.distributed.pipelining that works through ``stages`` in ``order``.

    Args:
        stages: of this rank, each a `PipelineStage`.
        order: as `bytesched pipeline plan` writes it: the file, or what was read of it.
        loss_fn: of an output and its target.
        arguments: what else torch's schedules take, such as ``scale_grads``.

    Raises `ConfigError` for a file that is no order, or is none of these ranks and stages, and
    `PluginError` if this torch has no schedule that takes an order.
    """
    from torch.distributed.pipelining import schedules

    kind: Any = getattr(schedules, "_PipelineScheduleRuntime", None)
    action: Any = getattr(schedules, "_Action", None)
    if action is None or not hasattr(kind, "_prepare_schedule_with_comms"):
        raise PluginError(
            f"pipelining of torch {torch.__version__} takes no order from outside: 2.13 to 2.15 do"
        )
    if not isinstance(order, Order):
        order = Order.read(order)
    _check(stages, order)
    schedule = kind(list(stages), order.micro_batches, loss_fn=loss_fn, **arguments)
    schedule._prepare_schedule_with_comms(
        {
            rank: [None if cell is None else action.from_str(str(cell)) for cell in row]
            for rank, row in enumerate(order.rows)
        },
        format="compute_only",
    )
    return schedule


def _check(stages: Sequence[Any], order: Order) -> None:
    """Raises ConfigError unless ``order`` has these stages on this rank."""
    if not stages:
        raise PluginError("a rank of a pipeline has at least one stage, and none was given")
    group = stages[0].group or distributed_c10d._get_default_group()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if order.ranks != size:
        raise ConfigError(
            f"{order.origin} is of {order.ranks} ranks, and this pipeline has {size}: plan it with "
            f"--ranks {size}"
        )
    if order.stages != stages[0].num_stages:
        raise ConfigError(
            f"{order.origin} is of {order.stages} stages, and the model was cut into "
            f"{stages[0].num_stages}"
        )
    its = [stage for stage, place in enumerate(order.stage_ranks) if place == rank]
    mine = sorted(stage.stage_index for stage in stages)
    if its != mine:
        raise ConfigError(
            f"{order.origin} has stages {', '.join(map(str, its))} on rank {rank} of the pipeline, "
            f"which was given stages {', '.join(map(str, mine))}"
        )
