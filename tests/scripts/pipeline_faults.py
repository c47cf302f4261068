"""Pipelines that cannot be wrapped, or that end before their time."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_models import (
    CPU,
    KINDS,
    SMALL,
    WHOLE,
    Kind,
    Pipeline,
    V,
    grid,
    ordered,
    replicas_alone,
)
from raised import prints_and_ends, told
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import bytesched
from bytesched.pipeline.order import Order
from bytesched.plugins.pipelines import ordered_schedule

LATER = ("0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1", "1F0,1F1,2F0,2B0,2F1,2B1,1B0,1B1")
KINDS["csv, but later"] = Kind(ordered(LATER), KINDS["csv"].ranks)


SHARDED = ("FSDP", "FSDP, named", "FSDP1", "a DTensor", "a DTensor, named")
IN_DDP = ("off, in DDP", "a hook of DDP", "DDP's mixed precision")


def refused(what: str) -> str:
    """The error of `wrap`, or of the first step after it."""
    pairs = grid()
    rank = dist.get_rank()
    later = "csv, but later" if rank == 3 else "csv"
    kinds = {
        "another placement": "interleaved" if rank > 1 else "csv",
        "another order": later,
        "another order, no replicas": later,
        "never reduced": what,
        "a hook of DDP": "csv split",
    }
    pipeline = Pipeline(kinds.get(what, "csv"), pairs, in_ddp=what in IN_DDP)
    if what == "other values" and rank == 2:
        pipeline.blocks[1].up.bias.data.add_(1)
    elif what == "one stage in DDP":
        stage = pipeline.stages[0]
        stage.submod = DistributedDataParallel(pipeline.blocks[0], process_group=pairs[1])
    elif what == "delayed by DDP":
        for stage, block in zip(pipeline.stages, pipeline.blocks, strict=True):
            stage.submod = DistributedDataParallel(
                block,
                process_group=pairs[1],
                delay_all_reduce_named_params=[("up.bias", block.up.bias)],
                param_to_hook_all_reduce=block.up.weight,
            )
    elif what == "a hook of DDP":
        for module in pipeline.modules:
            module.register_comm_hook(None, allreduce_hook)
    elif what == "sparse" and rank == 2:
        for block in pipeline.blocks:
            block.add_module("words", nn.Embedding(2, 2, sparse=True))
    elif what in SHARDED:
        _shard(pipeline, what)
    elif what == "DDP's mixed precision":
        # DDP itself makes streams of a GPU for it.
        for module in pipeline.modules:
            vars(module)["mixed_precision"] = _MixedPrecision(torch.float16)
    given = pipeline.modules[:1] if what == "some modules" else pipeline.schedule
    more: dict[str, dict[str, Any]] = {
        "shared device": {"share": "jobs"},
        "folded": {"accumulate": "adama"},
        "off": {"enabled": False},
        "off, in DDP": {"enabled": False},
        "a mapping": {"groups": {pipeline.modules[0]: pairs[1]}},
        "FSDP, named": {"groups": pairs[1]},
        "a DTensor, named": {"groups": pairs[1]},
    }
    options = SMALL | more.get(what, {})
    if what == "another order, no replicas":
        options["groups"], _ = replicas_alone()

    def run() -> None:
        bytesched.wrap(pipeline.optimizer, given, **options)
        pipeline.forward_backward(0)

    said = told(run)
    if bytesched.stats(pipeline.optimizer)["mode"] != "plain":
        bytesched.unwrap(pipeline.optimizer)
    return said


def _shard(pipeline: Pipeline, how: str) -> None:
    """Each replica has only a part of what the stages have."""
    mesh = DeviceMesh.from_group(pipeline.replicas, "cpu")
    for stage, block in zip(pipeline.stages, pipeline.blocks, strict=True):
        if how.startswith("a DTensor"):
            block.up.bias = nn.Parameter(distribute_tensor(block.up.bias.detach(), mesh))
        elif how == "FSDP1":
            stage.submod = FullyShardedDataParallel(
                block, pipeline.replicas, use_orig_params=True, device_id=CPU
            )
        else:
            fully_shard(block, mesh=mesh)
    pipeline.optimizer = torch.optim.SGD(
        [p for stage in pipeline.stages for p in stage.submod.parameters()], lr=0.1
    )


def wrapped_before_it_was_a_stage() -> str:
    pipeline, replicas = grid()
    torch.manual_seed(0)
    module = DistributedDataParallel(nn.Linear(8, 8), process_group=replicas)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    bytesched.wrap(optimizer, module, **SMALL)
    place = dist.get_rank(pipeline)
    stage = PipelineStage(module, place, 2, CPU, group=pipeline)
    schedule = KINDS["1f1b"].make([stage], 2, loss_fn=nn.functional.mse_loss)

    def run() -> None:
        x = torch.ones(4, 8)
        schedule.step(*([x] if place == 0 else []), target=x if place else None)

    prints_and_ends(run)


def ends_in_a_step(how: str) -> None:
    """The last stage of the second pipeline fails in its third step, with gradients on the wire."""
    script = Pipeline("csv split", grid())
    bytesched.wrap(script.optimizer, script.schedule, timeout_s=20, **SMALL)
    left = {"losses": 0}
    own = script.schedule._loss_fn

    def loss(output: Tensor, target: Tensor) -> Any:
        left["losses"] += 1
        if dist.get_rank() == 2 and left["losses"] > 5:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the weather")
        return own(output, target)

    script.schedule._loss_fn = loss

    def train() -> None:
        for step in range(6):
            script.one_step(step)
        bytesched.flush()

    prints_and_ends(train, Exception)


def v_stages() -> list[PipelineStage]:
    """Those of this rank, of the shape of a V on two ranks."""
    pipeline, _ = grid()
    mine = [stage for stage, rank in enumerate(V) if rank == dist.get_rank(pipeline)]
    return [PipelineStage(nn.Linear(8, 8), stage, 4, CPU, group=pipeline) for stage in mine]


def given_an_order(text: str, path: str) -> str:
    """The error of an order that a rank of two reads for its stages of a V."""
    stages = v_stages()
    if dist.get_rank() == 0:
        Path(path).write_text(text)
    dist.barrier()
    return told(lambda: ordered_schedule(stages, path, nn.functional.mse_loss))


def given_other_orders() -> str:
    """The error of a rank of two that reads another order than the other one."""
    stages = v_stages()
    order = Order.parse("\n".join(LATER if dist.get_rank() == 3 else WHOLE) + "\n")

    def run() -> None:
        schedule = ordered_schedule(stages, order, nn.functional.mse_loss)
        x = torch.ones(4, 8)
        is_first, is_last = (any(s.stage_index == end for s in stages) for end in (0, 3))
        schedule.step(*([x] if is_first else []), target=x if is_last else None)

    return told(run)


def loaded_after_wrap(who: str, path: str) -> str:
    """The error of a step with an order that was loaded after two good ones."""
    pairs = grid()
    rank = dist.get_rank()
    script = Pipeline("csv", pairs)
    bytesched.wrap(script.optimizer, script.schedule, **SMALL)
    script.one_step(0)
    rows = LATER if who == "all" or rank == 3 else WHOLE
    Path(path, str(rank)).write_text("".join(f"{row}\n" for row in rows))
    script.schedule._load_csv(str(Path(path, str(rank))))

    def step_and_flush() -> None:
        script.one_step(0)
        bytesched.flush()

    said = told(step_and_flush)
    # It raises the error that ended the session, if one has.
    assert told(partial(bytesched.unwrap, script.optimizer)) == said
    return said


def misused(how: str) -> str:
    """The error of a step after two good ones."""
    pairs = grid()
    script = Pipeline("csv split", pairs)
    frozen = script.blocks[0].up.bias.requires_grad_(how != "thawed")
    bytesched.wrap(script.optimizer, script.schedule, **SMALL)
    for _ in range(2):
        script.one_step(0)
    if how == "custom function":
        script.schedule.register_custom_function(
            schedules.REDUCE_GRAD, lambda action, context: script.stages[0].scale_grads(1)
        )
    elif how == "another schedule":
        script.schedule = script.kind.make(script.stages, 2, loss_fn=nn.functional.mse_loss)
    elif how == "another module":
        script.stages[0].submod = nn.Sequential(script.blocks[0])
    elif how == "thawed":
        frozen.requires_grad_()
    prints_and_ends(partial(script.one_step, 0))
