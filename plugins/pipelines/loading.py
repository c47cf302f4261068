"""A schedule of torch's that follows an order from a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from bytesched.config import Config
from bytesched.errors import ConfigError, PluginError
from bytesched.pipeline.order import Order

from ..c10d.entry import Entry
from .private import runtime, skip_self_sends


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

    Collective: all ranks of the pipeline make one, of the same order.

    Raises `ConfigError` for a file that is no order, or is none of these ranks and stages,
    `PluginError` if this torch has no schedule that takes an order, and `MismatchError` on all
    ranks of the pipeline if one of them has another order, or none.
    """
    if not stages:
        raise PluginError("a rank of a pipeline has at least one stage, and none was given")
    timeout_s = Config.load().timeout_s
    group = stages[0].group or distributed_c10d._get_default_group()
    with Entry(group, call="ordered_schedule") as ranks:
        kind, action = runtime()
        if not isinstance(order, Order):
            order = Order.read(order)
        _check(stages, group, order)
        ranks.agree([_statement(order)], timeout_s)
    schedule = kind(list(stages), order.micro_batches, loss_fn=loss_fn, **arguments)
    schedule._prepare_schedule_with_comms(
        {
            rank: [None if cell is None else action.from_str(str(cell)) for cell in row]
            for rank, row in enumerate(order.rows)
        },
        format="compute_only",
    )
    skip_self_sends(stages)
    return schedule


def _statement(order: Order) -> str:
    """What ranks with the same order have in common, wherever each has its file."""
    digest = hashlib.sha256(order.to_csv().encode()).hexdigest()[:12]
    return (
        f"an order of {order.stages} stages and {order.micro_batches} micro-batches with digest "
        f"{digest}"
    )


def _check(stages: Sequence[Any], group: dist.ProcessGroup, order: Order) -> None:
    """Raises ConfigError unless ``order`` has these stages on this rank."""
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
