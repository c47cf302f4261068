"""The orders that torch's schedules follow: its own, and what makes one follow that of a file."""

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
from bytesched.pipeline.order import Action, Kind, Order

from ..c10d.entry import Entry
from .private import runtime, schedule_class, skip_self_sends

#: name, and the placement of its stages: on one rank each, in rounds, or there and back
SCHEDULES = {
    "GPipe": "single",
    "1F1B": "single",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved",
    "ZBVZeroBubble": "v",
    "DualPipeV": "v",
}


def torch_order(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> Order:
    """The order of a schedule of ``SCHEDULES``.

    Raises ``ConfigError`` if the schedule is not made for these numbers, with torch's words, and
    ``PluginError`` if this torch has no such schedule or keeps its order elsewhere.
    """
    kind = schedule_class(name)
    if ranks == 1 and SCHEDULES[name] != "single":
        raise ConfigError(f"{name} is for several ranks")
    if name == "1F1B":
        # What torch lists for its last rank begins at micro-batch 1; it runs from 0.
        return _one_forward_one_backward(ranks, micro_batches)
    total = ranks * stages_per_rank
    stages = [_Stage(index, ranks, total) for index in range(0, total, ranks)]
    whole = SCHEDULES[name] == "single"
    try:
        # An order that is only looked at is not run.
        schedule = kind(stages[0] if whole else stages, micro_batches, loss_fn=lambda *_: None)
        # Since 2.5 or so a single stage's order has to be asked for.
        pipeline_order = getattr(schedule, "pipeline_order", None)
        if not pipeline_order:
            pipeline_order = schedule._get_pipeline_order()
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{name}: {error}") from None
    except (AttributeError, TypeError) as error:
        raise PluginError(
            f"the order of {name} cannot be read from torch {torch.__version__}: {error}"
        ) from error
    if pipeline_order is None:
        raise PluginError(f"the order of {name} cannot be read from torch {torch.__version__}")
    try:
        rows = tuple(tuple(_actions(pipeline_order[rank])) for rank in range(ranks))
        return Order(rows, f"torch's {name}")
    except ConfigError as error:
        # Of few micro-batches torch writes some that are not there.
        raise ConfigError(f"{name} is not made for these numbers: {error}") from None


def _one_forward_one_backward(ranks: int, micro_batches: int) -> Order:
    """As ``Schedule1F1B`` runs: the later a rank's stage, the fewer forwards come first."""
    rows = []
    for rank in range(ranks):
        ahead = min(micro_batches, ranks - rank)
        row = [Action(rank, Kind.FORWARD, n) for n in range(ahead)]
        for n in range(micro_batches):
            row.append(Action(rank, Kind.BACKWARD, n))
            if ahead + n < micro_batches:
                row.append(Action(rank, Kind.FORWARD, ahead + n))
        rows.append(tuple(row))
    return Order(tuple(rows), "torch's 1F1B")


class _Stage:
    """What a schedule reads of a stage to write its order."""

    is_first = is_last = False
    has_backward = True
    group_rank = 0

    def __init__(self, stage_index: int, ranks: int, num_stages: int) -> None:
        self.stage_index = stage_index
        self.group_size = ranks
        self.num_stages = num_stages
        self.submod = torch.nn.Identity()


def _actions(row: list[Any]) -> list[Action]:
    """What is computed; of overlapped actions, one after the other, as torch runs them."""
    kinds = {kind.value: kind for kind in Kind}
    return [
        Action(part.stage_index, kinds[part.computation_type.value], part.microbatch_index)
        for each in row
        if each is not None
        for part in getattr(each, "sub_actions", None) or (each,)
        if part.computation_type.value in kinds
    ]


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
        digest = hashlib.sha256(order.to_csv().encode()).hexdigest()[:12]
        what = f"{order.stages} stages and {order.micro_batches} micro-batches"
        ranks.agree([f"an order of {what} with digest {digest}"], timeout_s)
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
