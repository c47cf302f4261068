"""Pipelines on two ranks, twice: trained by a schedule of torch's, and with bytesched on top."""

from __future__ import annotations

import gc
import json
import runpy
import weakref
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from levels_scripts import on_named_hosts
from paths import ROOT
from pipeline_models import CPU, KINDS, SMALL, STEPS, WIDTH, Block, Pipeline, grid, replicas_alone
from round_ways import holding
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, schedules
from training import differences

import bytesched
from bytesched.pipeline.order import Order
from bytesched.plugins.ending import wait_for_ends
from bytesched.plugins.registry import sessions
from bytesched.run.watch import watch


def records(pipeline: Pipeline) -> Iterator[Any]:
    """What a training of a few steps shows: losses, and everything in the end."""
    script, optimizer = pipeline.script, pipeline.optimizer
    for step in range(STEPS):
        if script != "accumulates" or step % 2 == 0:
            optimizer.zero_grad(set_to_none=script != "keeps zeros")
        if script == "has a closure":
            yield optimizer.step(lambda: sum(pipeline.forward_backward(step)))  # noqa: B023
            continue
        yield pipeline.forward_backward(step)
        if script == "accumulates" and step % 2 == 0:
            continue
        if script == "clips":
            yield float(nn.utils.clip_grad_norm_(pipeline.parameters(), 0.05))
        if script == "reads":
            yield [p.grad.clone() for p in pipeline.parameters() if p.grad is not None]
        if pipeline.scales:
            pipeline.scaler.step(optimizer)
            pipeline.scaler.update()
            yield pipeline.scaler.get_scale()
        else:
            optimizer.step()
        if script == "reads":
            yield pipeline.values()
    yield pipeline.values()


def plain_and_wrapped(kind: str) -> tuple[Pipeline, Pipeline]:
    """The same pipeline twice, of which the second one is wrapped."""
    pairs = grid()
    plain, wrapped = (Pipeline(kind, pairs, plain=plain) for plain in (True, False))
    bytesched.wrap(wrapped.optimizer, wrapped.schedule, **SMALL)
    return plain, wrapped


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


def trains_as_plain(
    kind: str,
    way: str = "schedule",
    script: str = "",
    optimizer: str = "momentum",
    fields: dict[str, Any] | None = None,
    device: torch.device = CPU,
    *,
    hold: bool = False,
) -> list[str]:
    """Where the records of a wrapped training differ from those of a plain one.

    Args:
        hold: no sum begins before somebody waits for it, so that all of them cross the barrier.
    """
    pairs = grid() if len(set(KINDS[kind].ranks)) > 1 else replicas_alone()
    plain = Pipeline(kind, pairs, optimizer, plain=True, script=script, device=device)
    expected = list(records(plain))
    wrapped = Pipeline(kind, pairs, optimizer, script=script, in_ddp=way == "ddp", device=device)
    groups = {"groups": wrapped.replicas} if way == "named" else {}
    model = wrapped.modules if way == "modules" else wrapped.schedule
    with holding() if hold else nullcontext():
        bytesched.wrap(wrapped.optimizer, model, **groups, **{**SMALL, **(fields or {})})
    found = list(records(wrapped))
    stats = bytesched.stats(wrapped.optimizer)
    assert stats["mode"] == "cross", stats
    assert not hold or stats["barrier_crossed_pct"] == 100, stats
    bytesched.unwrap(wrapped.optimizer)
    dist.barrier()
    return list(differences(expected, found, "records"))


def trains_in_two_levels(kind: str) -> None:
    """Close to plain training, by four ranks on two hosts, of which each is a whole pipeline."""
    pairs = replicas_alone()
    plain, wrapped = (Pipeline(kind, pairs, plain=plain) for plain in (True, False))
    expected = list(records(plain))
    with on_named_hosts([2, 2]):
        bytesched.wrap(wrapped.optimizer, wrapped.schedule, **SMALL, hierarchy="on")
    found = list(records(wrapped))
    assert bytesched.stats(wrapped.optimizer)["levels"] == 2
    bytesched.unwrap(wrapped.optimizer)
    dist.barrier()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def trains_with(kind: str, options: dict[str, Any]) -> list[str]:
    return trains_as_plain(kind, **options)


def ddp_alone(kind: str) -> float:
    """How far gradients of DDP-wrapped stages, without bytesched, are from the mean."""
    pairs = grid()
    plain, in_ddp = Pipeline(kind, pairs, plain=True), Pipeline(kind, pairs, in_ddp=True)
    plain.forward_backward(0)
    in_ddp.forward_backward(0)
    parameters = zip(plain.parameters(), in_ddp.parameters(), strict=True)
    return max(float((p.grad - q.grad).abs().max()) for p, q in parameters)  # type: ignore[operator]


def unchanged_script(kind: str) -> None:
    """Under `bytesched run`: stages in DDP, and nothing of bytesched in the script."""
    pairs = grid()
    expected = list(records(Pipeline(kind, pairs, plain=True)))
    watch()
    script = Pipeline(kind, pairs, in_ddp=True)
    found = list(records(script))
    stats = bytesched.stats(script.optimizer)
    print(stats["mode"], not list(differences(expected, found, "records")), flush=True)


def unwrapped_in_the_middle(kind: str) -> list[str]:
    """A training goes on as before once it is unwrapped, and schedule and stages too."""
    plain, wrapped = plain_and_wrapped(kind)
    expected = [*records(plain), *records(plain)]
    found = list(records(wrapped))
    bytesched.unwrap(wrapped.optimizer)
    assert "step" not in vars(wrapped.schedule)
    assert not any("perform_reduce_grad" in vars(stage) for stage in wrapped.stages)
    wrapped.plain = True
    found += records(wrapped)
    return list(differences(expected, found, "records"))


def ends_with_its_schedule() -> tuple[list[Any], bool]:
    """The sessions there are, and whether one is kept, when schedule and optimizer are gone."""
    _, pipeline = plain_and_wrapped("csv")
    list(records(pipeline))
    session = weakref.ref(sessions(pipeline.optimizer)[0])
    del pipeline
    gc.collect()
    wait_for_ends()
    gc.collect()
    return sessions(), session() is not None


def evaluated_by_another_schedule(when: str) -> list[str]:
    """What a forward-only schedule over the same stages changes."""
    both = plain, wrapped = plain_and_wrapped("1f1b")
    for pipeline in both:
        only_forward = ScheduleGPipe(pipeline.stages[0], 2)

        def evaluate(at: str, schedule: Any = only_forward, its: Pipeline = pipeline) -> None:
            if at == when:
                with torch.no_grad():
                    schedule.step(*([torch.ones(4, WIDTH)] if its.is_first else []))

        for step in range(STEPS):
            pipeline.optimizer.zero_grad()
            evaluate("before")
            pipeline.forward_backward(step)
            evaluate("between")
            pipeline.optimizer.step()
            evaluate("after")
    bytesched.unwrap(wrapped.optimizer)
    return list(differences(plain.values(), wrapped.values(), "values"))


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


def optimizer_for_each_stage() -> list[str]:
    """What differs if a rank wraps two optimizers with one schedule."""
    pairs = grid()
    both = [Pipeline("interleaved", pairs, plain=plain) for plain in (True, False)]
    for pipeline in both:
        optimizers = [
            torch.optim.SGD(block.parameters(), lr=0.1 / (n + 1))
            for n, block in enumerate(pipeline.blocks)
        ]
        for optimizer in optimizers:
            if not pipeline.plain:
                bytesched.wrap(optimizer, pipeline.schedule, **SMALL)
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            pipeline.forward_backward(step)
            for optimizer in optimizers:
                optimizer.step()
            # Evaluated between two steps of training.
            pipeline.evaluate(step)
    bytesched.unwrap(optimizers[0])
    expected, found = (pipeline.parameters_now() + pipeline.seen for pipeline in both)
    return list(differences(expected, found, "values"))
