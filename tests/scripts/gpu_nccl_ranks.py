"""Ranks over NCCL that share one device, as those of `bytesched bench --gpu-ranks`; their cases."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from gpu_comparing import DEVICE, CudaJob
from rank_worker import resolve
from ranks import Ranks, address_of
from training import STEPS, Job, adamw, train

from bytesched.bench.gpu_ranks import nccl_variables
from bytesched.plugins.bench.workloads.models import TINY, named

T = TypeVar("T")


class NcclRanks(Ranks):
    """A pool of ranks whose default process group is NCCL's.

    Args:
        variables: of the environment of each of them, from `mps`.
    """

    def __init__(self, world_size: int, variables: dict[str, str]) -> None:
        super().__init__(world_size)
        self._variables = variables

    def run(self, case: Callable[..., T], *args: object, timeout_s: float = 150.0) -> list[T]:
        """What `case(*args)` returned on each rank. Raises `RankFailure` if it did not on one."""
        return super().run(
            on_one_device, self._variables, address_of(case), args, timeout_s=timeout_s
        )


def on_one_device(variables: dict[str, str], case: tuple[str, str], args: tuple[Any, ...]) -> Any:
    """What the case returns, in a rank whose default process group is NCCL's."""
    if dist.get_backend() != "nccl":
        rank = dist.get_rank()
        dist.destroy_process_group()
        os.environ.update(
            variables,
            **nccl_variables(rank),
            LOCAL_RANK="0",
            # Other keys of the store than those of the group before.
            TORCHELASTIC_RESTART_COUNT="1",
            # The rank is stopped between cases, for as long as they are apart.
            TORCH_NCCL_ENABLE_MONITORING="0",
        )
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl", timeout=timedelta(seconds=100))
    return resolve(case)(*args)


def collectives(elements: int) -> list[str]:
    """Those that are wrong, of blocks of so many elements."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every = torch.arange(elements * size, dtype=torch.float32, device=DEVICE)
    block = slice(rank * elements, (rank + 1) * elements)
    total = size * every + sum(range(size))
    wrong = []

    summed = every + rank
    dist.all_reduce(summed)
    if not torch.equal(summed, total):
        wrong.append("all-reduce")

    scattered = torch.empty(elements, device=DEVICE)
    dist.reduce_scatter_tensor(scattered, every + rank)
    if not torch.equal(scattered, total[block]):
        wrong.append("reduce-scatter")

    gathered = torch.empty_like(every)
    dist.all_gather_into_tensor(gathered, every[block].clone())
    if not torch.equal(gathered, every):
        wrong.append("all-gather")
    return wrong


class DeterministicJob(CudaJob):
    """One whose kernels give the same bits each time, where there are such."""

    def __init__(self, *, wrapped: bool, **fields: Any) -> None:
        super().__init__(wrapped=wrapped, **fields)
        torch.use_deterministic_algorithms(True, warn_only=True)

    def close(self) -> None:
        try:
            super().close()
        finally:
            torch.use_deterministic_algorithms(False)


def trained(job: Job, model: str) -> None:
    """A small model of the bench's."""
    workload = named(model, 0, 1, TINY, DEVICE.type)
    module = job.ddp(workload.model)
    optimizer = job.wrap(adamw(module), module)
    train(
        job,
        module,
        optimizer,
        steps=2 * STEPS,
        loss=lambda step: workload.loss(module, 2 * step + job.rank),
    )
    job.record_state(module, optimizer)
