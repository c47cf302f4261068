"""Two jobs of one rank each that share a CUDA device: both ranks of a test, each over NCCL."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from gpu_attached import attached
from gpu_comparing import DEVICE
from gpu_scripts import WIDE, wide
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from training import adamw

STEPS = 24


@contextlib.contextmanager
def own_job() -> Iterator[dist.ProcessGroup]:
    """A group over NCCL of this rank alone."""
    torch.cuda.set_device(DEVICE)
    groups = [dist.new_group([rank], backend="nccl") for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()]
    assert isinstance(group, dist.ProcessGroup)
    try:
        yield group
    finally:
        torch.cuda.synchronize(DEVICE)
        dist.barrier()
        dist.destroy_process_group(group)


def job(group: dist.ProcessGroup, **fields: Any) -> tuple[list[Tensor], dict[str, Any], float]:
    """The losses and weights of a job, its figures, and how long it took."""
    # Another model and other data than that of the other job.
    torch.manual_seed(7 + dist.get_rank())
    model = DistributedDataParallel(wide().to(DEVICE), process_group=group)
    optimizer = adamw(model, lr=1e-4)
    x = torch.randn(2048, WIDE, device=DEVICE)
    losses = []
    torch.cuda.synchronize(DEVICE)
    began_s = time.perf_counter()
    with attached(optimizer, model, **fields) as session:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
        session.flush()
        torch.cuda.synchronize(DEVICE)
        took_s = time.perf_counter() - began_s
        stats: dict[str, Any] = session.stats()
    found = [*losses, *(p.detach() for p in model.parameters())]
    return [tensor.cpu() for tensor in found], stats, took_s


def in_turns(name: str) -> tuple[list[str], dict[str, float]]:
    """What differs from this job alone when the other one computes in turn with it; figures."""
    with own_job() as group:
        for rank in range(dist.get_world_size()):
            if rank == dist.get_rank():
                alone, before, alone_s = job(group)
            dist.barrier()
        beside, stats, beside_s = job(group, share=name)
    wrong = [
        f"tensor {number} (losses first): {one.flatten()[:4]} became {other.flatten()[:4]}"
        for number, (one, other) in enumerate(zip(alone, beside, strict=True))
        if not torch.equal(one, other)
    ]
    turns = int(stats["turns"]) - int(before["turns"])
    if turns < STEPS:
        wrong.append(f"{turns} turns in {STEPS} steps")
    figures = {
        "alone_ms": 1e3 * alone_s,
        "in_turns_ms": 1e3 * beside_s,
        "turns": turns,
        "turn_wait_ms": 1e3 * (float(stats["turn_wait_s"]) - float(before["turn_wait_s"])),
        "turns_ended": float(stats["turns_ended"]) - float(before["turns_ended"]),
    }
    return wrong, figures
