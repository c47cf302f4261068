"""Pipelines on two ranks, twice: trained by a schedule of torch's, and with bytesched on top."""

from __future__ import annotations

import gc
import json
import runpy
import weakref
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from levels_scripts import on_named_hosts
from paths import ROOT
from pipeline_models import (
    CPU,
    KINDS,
    SMALL,
    STEPS,
    WIDTH,
    Block,
    Pipeline,
    grid,
    replicas_alone,
)
from round_ways import holding
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, schedules

import bytesched
from bytesched.pipeline.order import Order
from bytesched.plugins.ending import wait_for_ends
from bytesched.plugins.registry import sessions
from bytesched.run.watch import watch


def records(pipeline: Pipeline, *, plain: bool, script: str) -> Iterator[Any]:
    """What a training of a few steps shows: losses, and everything in the end."""
    for step in range(STEPS):
        if script != "accumulates" or step % 2 == 0:
            pipeline.optimizer.zero_grad(set_to_none=script != "keeps zeros")
        if script == "has a closure":
            yield pipeline.optimizer.step(partial(pipeline.reduced, step, plain=plain))
            continue
        yield pipeline.forward_backward(step)
        if plain:
            # Each step of a schedule is reduced, as by DDP.
            pipeline.reduce()
        if script == "accumulates" and step % 2 == 0:
            continue
        if script == "clips":
            yield float(nn.utils.clip_grad_norm_(pipeline.parameters(), 0.05))
        if script == "reads":
            yield [p.grad.clone() for p in pipeline.parameters() if p.grad is not None]
        if pipeline.scales:
            pipeline.scaler.step(pipeline.optimizer)
            pipeline.scaler.update()
            yield pipeline.scaler.get_scale()
        else:
            pipeline.optimizer.step()
        if script == "reads":
            yield pipeline.values()
    yield pipeline.values()


def trains_the_example(order: str, folder: str) -> bool:
    """Whether it has the same losses with and without bytesched."""
    train = runpy.run_path(str(ROOT / "examples" / "pipeline_gpt.py"))["train"]
    found = []
    for plain in (True, False):
        path = Path(folder, f"plain{plain}.json")
        train(Namespace(order=order, plain=plain, steps=3, batch=8, json=path))
        if dist.get_rank() == 0:
            found.append(json.loads(path.read_text()))
    return not found or (len(found[0]) == 3 and found[0] == found[1])


def same(one: Any, other: Any) -> bool:
    """Whether two records are equal, bit for bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def trains_as_plain(
    kind: str,
    way: str = "schedule",
    script: str = "",
    optimizer: str = "momentum",
    fields: dict[str, Any] | None = None,
    device: torch.device = CPU,
    *,
    hold: bool = False,
) -> list[int]:
    """Numbers of the records in which a wrapped training differs from a plain one.

    Args:
        hold: no sum begins before somebody waits for it, so that all of them cross the barrier.
    """
    pairs = grid() if len(set(KINDS[kind].ranks)) > 1 else replicas_alone()
    plain = Pipeline(kind, pairs, optimizer, script=script, device=device)
    expected = list(records(plain, plain=True, script=script))
    wrapped = Pipeline(kind, pairs, optimizer, script=script, in_ddp=way == "ddp", device=device)
    groups = {"groups": wrapped.replicas} if way == "named" else {}
    model = wrapped.modules if way == "modules" else wrapped.schedule
    with holding() if hold else nullcontext():
        bytesched.wrap(wrapped.optimizer, model, **groups, **{**SMALL, **(fields or {})})
    found = list(records(wrapped, plain=False, script=script))
    stats = bytesched.stats(wrapped.optimizer)
    assert stats["mode"] == "cross", stats
    assert not hold or stats["barrier_crossed_pct"] == 100, stats
    bytesched.unwrap(wrapped.optimizer)
    dist.barrier()
    assert len(expected) == len(found)
    return [
        n
        for n, (one, other) in enumerate(zip(expected, found, strict=True))
        if not same(one, other)
    ]


def trains_in_two_levels(kind: str) -> None:
    """Close to plain training, by four ranks on two hosts, of which each is a whole pipeline."""
    pairs = replicas_alone()
    plain, wrapped = (Pipeline(kind, pairs, "momentum") for _ in range(2))
    expected = list(records(plain, plain=True, script=""))
    with on_named_hosts([2, 2]):
        bytesched.wrap(wrapped.optimizer, wrapped.schedule, **SMALL, hierarchy="on")
    found = list(records(wrapped, plain=False, script=""))
    assert bytesched.stats(wrapped.optimizer)["levels"] == 2
    bytesched.unwrap(wrapped.optimizer)
    dist.barrier()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def crosses_the_barrier(kind: str) -> list[int]:
    """The same, where every sum is on its way when ``step()`` is called."""
    return trains_as_plain(kind, hold=True)


def ddp_alone(kind: str) -> float:
    """How far gradients of DDP-wrapped stages, without bytesched, are from the mean."""
    pairs = grid()
    plain, in_ddp = Pipeline(kind, pairs), Pipeline(kind, pairs, in_ddp=True)
    plain.forward_backward(0)
    plain.reduce()
    in_ddp.forward_backward(0)
    parameters = zip(plain.parameters(), in_ddp.parameters(), strict=True)
    return max(float((p.grad - q.grad).abs().max()) for p, q in parameters)  # type: ignore[operator]


def unchanged_script(kind: str) -> None:
    """Under `bytesched run`: stages in DDP, and nothing of bytesched in the script."""
    pairs = grid()
    expected = list(records(Pipeline(kind, pairs), plain=True, script=""))
    watch()
    script = Pipeline(kind, pairs, in_ddp=True)
    found = list(records(script, plain=False, script=""))
    stats = bytesched.stats(script.optimizer)
    print(stats["mode"], all(map(same, expected, found)), flush=True)


def unwrapped_in_the_middle(kind: str) -> bool:
    """Whether a training goes on as before once it is unwrapped, and schedule and stages too."""
    pairs = grid()
    plain, wrapped = Pipeline(kind, pairs), Pipeline(kind, pairs)
    expected = [*records(plain, plain=True, script=""), *records(plain, plain=True, script="")]
    bytesched.wrap(wrapped.optimizer, wrapped.schedule, **SMALL)
    found = list(records(wrapped, plain=False, script=""))
    bytesched.unwrap(wrapped.optimizer)
    assert "step" not in vars(wrapped.schedule)
    assert not any("perform_reduce_grad" in vars(stage) for stage in wrapped.stages)
    found += records(wrapped, plain=True, script="")
    return all(map(same, expected, found))


def ends_with_its_schedule() -> tuple[list[Any], bool]:
    """The sessions there are, and whether one is kept, when schedule and optimizer are gone."""
    pairs = grid()
    pipeline = Pipeline("csv", pairs)
    bytesched.wrap(pipeline.optimizer, pipeline.schedule, **SMALL)
    list(records(pipeline, plain=False, script=""))
    session = weakref.ref(sessions(pipeline.optimizer)[0])
    del pipeline
    gc.collect()
    wait_for_ends()
    gc.collect()
    return sessions(), session() is not None


def evaluated_by_another_schedule(when: str) -> bool:
    """Whether a forward-only schedule over the same stages changes nothing."""
    pairs = grid()
    plain, wrapped = Pipeline("1f1b", pairs), Pipeline("1f1b", pairs)
    bytesched.wrap(wrapped.optimizer, wrapped.schedule, **SMALL)
    for pipeline in (plain, wrapped):
        only_forward = ScheduleGPipe(pipeline.stages[0], 2)

        def evaluate(at: str, schedule: Any = only_forward, its: Pipeline = pipeline) -> None:
            if at == when:
                with torch.no_grad():
                    schedule.step(*([torch.ones(4, WIDTH)] if its.is_first else []))

        for step in range(STEPS):
            pipeline.optimizer.zero_grad()
            evaluate("before")
            pipeline.forward_backward(step)
            if pipeline is plain:
                pipeline.reduce()
            evaluate("between")
            pipeline.optimizer.step()
            evaluate("after")
    bytesched.unwrap(wrapped.optimizer)
    return same(plain.values(), wrapped.values())


def follows_a_planned_order(path: str) -> float:
    """How far gradients by a planned order are from those of one process."""
    pairs = grid()
    order = Order.read(path)
    count = order.micro_batches
    pipeline, _ = pairs
    place = dist.get_rank(pipeline)
    mine = [stage for stage, rank in enumerate(order.stage_ranks) if rank == place]
    blocks = [Block(stage) for stage in mine]
    stages = [
        PipelineStage(block, stage, order.stages, torch.device("cpu"), group=pipeline)
        for stage, block in zip(mine, blocks, strict=True)
    ]
    schedule = schedules._PipelineScheduleRuntime(stages, count, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(path)
    torch.manual_seed(3)
    x, y = torch.randn(2 * count, WIDTH), torch.randn(2 * count, WIDTH)
    has_last = order.stages - 1 in mine
    schedule.step(*([x] if 0 in mine else []), target=y if has_last else None)
    whole = nn.Sequential(*(Block(stage) for stage in range(order.stages)))
    nn.functional.mse_loss(whole(x), y).backward()
    return max(
        float((p.grad - q.grad).abs().max())  # type: ignore[operator]
        for stage, block in zip(mine, blocks, strict=True)
        for p, q in zip(block.parameters(), whole[stage].parameters(), strict=True)
    )


def optimizer_for_each_stage() -> bool:
    """Whether a rank that wraps two optimizers with one schedule trains as plain."""
    pairs = grid()
    plain, wrapped = Pipeline("interleaved", pairs), Pipeline("interleaved", pairs)
    first, second = (
        [torch.optim.SGD(block.parameters(), lr=0.1 / (n + 1)) for n, block in enumerate(p.blocks)]
        for p in (plain, wrapped)
    )
    for optimizer in second:
        bytesched.wrap(optimizer, wrapped.schedule, **SMALL)
    for pipeline, optimizers in ((plain, first), (wrapped, second)):
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            pipeline.forward_backward(step)
            if pipeline is plain:
                pipeline.reduce()
            for optimizer in optimizers:
                optimizer.step()
            # Evaluated between two steps of training.
            pipeline.evaluate(step)
    bytesched.unwrap(second[0])
    return same(plain.parameters_now(), wrapped.parameters_now()) and plain.seen == wrapped.seen
