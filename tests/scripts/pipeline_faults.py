"""Pipelines that cannot be wrapped, or that end before their time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
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
    grid,
    ordered,
    replicas_alone,
)
from raised import raised
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import bytesched
from bytesched.errors import BytesschedError
from bytesched.pipeline.order import Order
from bytesched.plugins.pipelines import ordered_schedule

LATER = ("0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1", "1F0,1F1,2F0,2B0,2F1,2B1,1B0,1B1")
KINDS["csv, but later"] = Kind(ordered(LATER), KINDS["csv"].ranks)


SHARDED = ("FSDP", "FSDP, named", "FSDP1", "a DTensor", "a DTensor, named")
IN_DDP = ("off, in DDP", "a hook of DDP", "DDP's mixed precision")


def told(run: Callable[[], object]) -> str:
    return raised(run) or "no error"


def refused(what: str) -> str:
    """The error of `wrap`, or of the first step after it."""
    pairs = grid()
    rank = dist.get_rank()
    kind, options, given = "csv", dict(SMALL), None
    if what == "another placement" and rank > 1:
        kind = "interleaved"
    if what in ("another order", "another order, no replicas") and rank == 3:
        kind = "csv, but later"
    if what == "never reduced":
        kind = what
    if what == "a hook of DDP":
        kind = "csv split"
    pipeline = Pipeline(kind, pairs, in_ddp=what in IN_DDP)
    if what == "other values" and rank == 2:
        with torch.no_grad():
            pipeline.blocks[1].up.bias.add_(1)
    if what == "one stage in DDP":
        stage = pipeline.stages[0]
        stage.submod = DistributedDataParallel(pipeline.blocks[0], process_group=pairs[1])
    if what == "delayed by DDP":
        for stage, block in zip(pipeline.stages, pipeline.blocks, strict=True):
            stage.submod = DistributedDataParallel(
                block,
                process_group=pairs[1],
                delay_all_reduce_named_params=[("up.bias", block.up.bias)],
                param_to_hook_all_reduce=block.up.weight,
            )
    if what == "a hook of DDP":
        for module in pipeline.modules:
            module.register_comm_hook(None, allreduce_hook)
    if what == "sparse" and rank == 2:
        for block in pipeline.blocks:
            block.add_module("words", nn.Embedding(2, 2, sparse=True))
    if what in SHARDED:
        _shard(pipeline, what)
    if what.endswith("named"):
        options |= {"groups": pairs[1]}
    if what == "DDP's mixed precision":
        # DDP itself makes streams of a GPU for it.
        for module in pipeline.modules:
            vars(module)["mixed_precision"] = _MixedPrecision(torch.float16)
    if what == "some modules":
        given = pipeline.modules[:1]
    more: dict[str, dict[str, Any]] = {
        "shared device": {"share": "jobs"},
        "folded": {"accumulate": "adama"},
        "off": {"enabled": False},
        "off, in DDP": {"enabled": False},
        "a mapping": {"groups": {pipeline.modules[0]: pairs[1]}},
    }
    options |= more.get(what, {})
    if what == "another order, no replicas":
        options["groups"], _ = replicas_alone()

    def run() -> None:
        bytesched.wrap(pipeline.optimizer, given or pipeline.schedule, **options)
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
    """The error of the first step."""
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

    said = told(run)
    print(said, flush=True)
    os._exit(0)


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
    try:
        for step in range(6):
            script.optimizer.zero_grad()
            script.forward_backward(step)
            script.optimizer.step()
        bytesched.flush()
        print("no error", flush=True)
    except (BytesschedError, RuntimeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(0)


def given_an_order(text: str, path: str) -> str:
    """The error of an order that a rank of two reads for its stages of a V."""
    pipeline, _ = grid()
    if dist.get_rank() == 0:
        Path(path).write_text(text)
    dist.barrier()
    place = dist.get_rank(pipeline)
    mine = [stage for stage, rank in enumerate(KINDS["csv"].ranks) if rank == place]
    stages = [PipelineStage(nn.Linear(8, 8), stage, 4, CPU, group=pipeline) for stage in mine]
    return told(lambda: ordered_schedule(stages, path, nn.functional.mse_loss))


def given_other_orders() -> str:
    """The error of a rank of two that reads another order than the other one."""
    pipeline, _ = grid()
    place = dist.get_rank(pipeline)
    mine = [stage for stage, rank in enumerate(KINDS["csv"].ranks) if rank == place]
    stages = [PipelineStage(nn.Linear(8, 8), stage, 4, CPU, group=pipeline) for stage in mine]
    rows = LATER if dist.get_rank() == 3 else WHOLE
    order = Order.parse("\n".join(rows) + "\n")

    def run() -> None:
        schedule = ordered_schedule(stages, order, nn.functional.mse_loss)
        x = torch.ones(4, 8)
        schedule.step(*([x] if 0 in mine else []), target=x if 3 in mine else None)

    return told(run)


def loaded_after_wrap(who: str, path: str) -> str:
    """The error of a step with an order that was loaded after two good ones."""
    pairs = grid()
    rank = dist.get_rank()
    script = Pipeline("csv", pairs)
    bytesched.wrap(script.optimizer, script.schedule, **SMALL)

    def step() -> None:
        script.optimizer.zero_grad()
        script.forward_backward(0)
        script.optimizer.step()

    step()
    rows = LATER if who == "all" or rank == 3 else WHOLE
    Path(path, str(rank)).write_text("".join(f"{row}\n" for row in rows))
    script.schedule._load_csv(str(Path(path, str(rank))))

    def step_and_flush() -> None:
        step()
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

    def step() -> None:
        script.optimizer.zero_grad()
        script.forward_backward(0)
        script.optimizer.step()

    step()
    step()
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
    print(told(step), flush=True)
    os._exit(0)
