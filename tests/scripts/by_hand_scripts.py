"""Scripts that reduce something between backward() and step(), and what is said of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from training import Job, adamw, mlp

#: as settings, and whether the model is under DDP
MODES: dict[str, tuple[dict[str, Any], bool]] = {
    "plain module": ({}, False),
    "ddp": ({}, True),
    "split": ({"split": "on"}, True),
    "shard": ({"shard": True}, True),
}


def _gradients(model: Any) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def flat(model: Any) -> None:
    """As cleanrl does."""
    gradients = torch.cat([p.grad.view(-1) for p in model.parameters()])
    dist.all_reduce(gradients)
    begin = 0
    for p in model.parameters():
        p.grad.data.copy_(gradients[begin : begin + p.numel()].view_as(p.grad.data) / 2)
        begin += p.numel()
    clip_grad_norm_(model.parameters(), 0.5)


def one_by_one(model: Any) -> None:
    """As torch's tutorial does."""
    for p in model.parameters():
        dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)
        p.grad.data /= 2


def under_way_together(model: Any) -> None:
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for work in works:
        work.wait()
    for p in model.parameters():
        p.grad.mul_(0.5)


def coalesced(model: Any) -> None:
    gradients = _gradients(model)
    dist.all_reduce_coalesced(gradients)
    torch._foreach_div_(gradients, 2.0)


def scattered(model: Any) -> None:
    """The sum of a half each, and the halves of both."""
    gradients = torch.cat([grad.reshape(-1) for grad in _gradients(model)])
    half = torch.empty(-(-len(gradients) // 2))
    padded = torch.cat([gradients, torch.zeros(2 * len(half) - len(gradients))])
    dist.reduce_scatter_tensor(half, padded)
    dist.all_gather_into_tensor(padded, half / 2)
    begin = 0
    for grad in _gradients(model):
        grad.copy_(padded[begin : begin + grad.numel()].view_as(grad))
        begin += grad.numel()


def in_fp16(model: Any) -> None:
    gradients = torch.cat([grad.reshape(-1) for grad in _gradients(model)])
    dist.all_reduce(gradients.half())


def a_metric(model: Any) -> None:
    """After all gradients were read."""
    norm = torch.stack([grad.abs().sum() for grad in _gradients(model)]).sum()
    dist.all_reduce(norm)


def what_is_no_gradient(model: Any) -> None:
    """It is as large as all of them, and none of them has been read."""
    dist.all_reduce(torch.ones(sum(p.numel() for p in model.parameters())))


def each_by_itself(model: Any) -> None:
    """Of ranks that are others, or none."""
    gradients = torch.cat([grad.reshape(-1) for grad in _gradients(model)])
    dist.all_reduce(gradients, group=_alone())


def _alone() -> Any:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


BY_HAND = (flat, one_by_one, under_way_together, coalesced, scattered, in_fp16)
NOT_BY_HAND = (a_metric, what_is_no_gradient, each_by_itself)


def said(mode: str, names: list[str]) -> dict[str, list[str]]:
    """The warnings of each script."""
    return {name: _said(mode, _train, globals()[name]) for name in names}


def said_once(name: str) -> list[str]:
    """Where one step of three does so."""
    return _said("ddp", _train, globals()[name], {1})


def said_without_sync() -> list[str]:
    """Where what is reduced by hand was not reduced before."""
    return _said("ddp", _train_without_sync)


def _said(mode: str, train: Callable[..., None], *args: Any) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("bytesched")
    logger.addHandler(handler)
    fields, under_ddp = MODES[mode]
    try:
        with contextlib.closing(Job(wrapped=True, module_alone=not under_ddp, **fields)) as job:
            train(job, *args)
    finally:
        logger.removeHandler(handler)
    return lines


def _train(job: Job, reduce: Callable[[Any], None], steps: set[int] | None = None) -> None:
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model)
    for step in range(5):
        optimizer.zero_grad()
        model(job.inputs(step)).square().mean().backward()
        if steps is None or step in steps:
            reduce(model)
        optimizer.step()


def _train_without_sync(job: Job) -> None:
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model)
    for step in range(5):
        optimizer.zero_grad()
        with contextlib.nullcontext() if step == 0 else model.no_sync():
            model(job.inputs(step)).square().mean().backward()
        if step:
            flat(model)
        optimizer.step()
