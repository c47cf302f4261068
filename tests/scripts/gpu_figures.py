"""What bytesched costs on a CUDA device, in time and in memory, for the ranks of a test."""

from __future__ import annotations

import contextlib
import gc
import time
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu_attached import attached
from gpu_comparing import DEVICE, CudaJob
from gpu_scripts import nccl, wide, wide_steps
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import adamw

# -- time ------------------------------------------------------------------------------


class Size(NamedTuple):
    """Of a stack of transformer layers, each of which has twelve parameters."""

    layers: int
    width: int
    sequences: int
    length: int
    steps: int


SIZES = {
    # Kernels of a few microseconds: what the host does for each parameter shows.
    "small kernels": Size(layers=12, width=128, sequences=4, length=32, steps=10),
    "large kernels": Size(layers=12, width=1024, sequences=32, length=128, steps=4),
}
#: in which plain and wrapped steps alternate, after one to warm up
ROUNDS = 10


class Trained:
    """A model over NCCL that trains by itself."""

    def __init__(self, size: Size, group: dist.ProcessGroup) -> None:
        torch.manual_seed(7)
        block = nn.TransformerEncoderLayer(
            size.width, max(2, size.width // 64), 4 * size.width, dropout=0.0, batch_first=True
        )
        stack = nn.TransformerEncoder(block, size.layers, enable_nested_tensor=False)
        self.model = DistributedDataParallel(stack.to(DEVICE), process_group=group)
        self.optimizer = adamw(self.model, lr=1e-4)
        self.x = torch.randn(size.sequences, size.length, size.width, device=DEVICE)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            self.optimizer.step()


def overhead(name: str) -> dict[str, float]:
    """Milliseconds of a step over NCCL with one rank, in which nothing has to be sent.

    `_host_ms` is until the last of several steps returns, `_ms` until the device has computed them
    all. Plain and wrapped steps alternate in one process, in several rounds; medians.
    """
    size = SIZES[name]
    times: dict[str, list[float]] = {}
    with nccl() as group, contextlib.ExitStack() as stack:
        plain, wrapped = Trained(size, group), Trained(size, group)
        session = stack.enter_context(attached(wrapped.optimizer, wrapped.model))
        for round_number in range(1 + ROUNDS):
            for kind, trained in (("ddp", plain), ("bytesched", wrapped)):
                torch.cuda.synchronize(DEVICE)
                began_s = time.perf_counter()
                trained.steps(size.steps)
                returned_s = time.perf_counter()
                if trained is wrapped:
                    session.flush()
                torch.cuda.synchronize(DEVICE)
                ended_s = time.perf_counter()
                if round_number:
                    times.setdefault(f"{kind}_host_ms", []).append(returned_s - began_s)
                    times.setdefault(f"{kind}_ms", []).append(ended_s - began_s)
        found = {figure: 1e3 * median(seconds) / size.steps for figure, seconds in times.items()}
        stats: dict[str, Any] = session.stats()
    ratios = [b / a for a, b in zip(times["ddp_ms"], times["bytesched_ms"], strict=True)]
    found |= {"ratio": median(ratios), "least_ratio": min(ratios), "most_ratio": max(ratios)}
    found["parameters"] = len(list(plain.model.parameters()))
    found["barrier_crossed_pct"] = float(stats["barrier_crossed_pct"])
    return found


# -- memory ----------------------------------------------------------------------------

#: how gradients and the state of AdamW are held
WAYS: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "ddp with bucket views": None,
    "bytesched": {},
    "bytesched, shard=True": {"shard": True},
}


def peak_mib(way: str) -> float:
    """The most that this rank's tensors took while a model trained with AdamW, its own included."""
    # Workspaces of libraries, which the first product of a process makes.
    wide(1).to(DEVICE)(torch.randn(8, 2048, device=DEVICE)).sum().backward()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    fields = WAYS[way]
    job = CudaJob(wrapped=fields is not None, partition_bytes=0, credit_bytes=0)
    with contextlib.closing(job):
        model = job.ddp(wide(), gradient_as_bucket_view=way.endswith("views"))
        optimizer = job.wrap(adamw(model, lr=1e-4), model, **(fields or {}))
        x = job.inputs(0, 64, 2048)
        for _ in wide_steps(model, optimizer, x):
            pass
        torch.cuda.synchronize(DEVICE)
    dist.barrier()
    return (torch.cuda.max_memory_allocated(DEVICE) - before) / 2**20
