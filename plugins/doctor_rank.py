"""What `bytesched doctor` runs in processes of its own, so that nothing there can hang or kill it.

A command prints one JSON object: `backends`; `loopback` or `training` with
`<rank> <store file> <timeout s>`.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import bytesched

WORLD_SIZE = 2
SMALL_BYTES = 4
LARGE_BYTES = 8 << 20
ROUNDS = 5
STEPS = 4


def backends() -> dict[str, object]:
    """Return what this build of torch can communicate with, and on which devices."""
    cuda = torch.cuda.is_available()
    return {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cuda
        else [],
    }


def loopback(rank: int) -> dict[str, object]:
    """Return the time in ms of a small and a large all-reduce between two processes.

    Raises `ArithmeticError` when a sum is wrong.
    """
    return {
        "small_ms": _all_reduce_ms(rank, SMALL_BYTES),
        "large_ms": _all_reduce_ms(rank, LARGE_BYTES),
        "large_bytes": LARGE_BYTES,
    }


def training(rank: int, timeout_s: float) -> dict[str, object]:
    """Return whether a few steps with bytesched equal those without, and how it ran."""
    plain, _ = _trained(rank, timeout_s, wrapped=False)
    ours, figures = _trained(rank, timeout_s, wrapped=True)
    return {
        "steps": STEPS,
        "equal": all(map(torch.equal, plain, ours)),
        "mode": figures["mode"],
        "crossed_steps": figures["barrier_crossed_steps"] if figures["mode"] == "cross" else 0,
    }


def _trained(
    rank: int, timeout_s: float, *, wrapped: bool
) -> tuple[list[torch.Tensor], dict[str, int | float | str]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8))
    model = DistributedDataParallel(module)
    optimizer = AdamW(model.parameters())
    bytesched.wrap(
        optimizer,
        model,
        enabled=wrapped,
        partition_bytes=4096,
        compression="none",
        timeout_s=timeout_s,
        timeline="",
        log_level="WARNING",
    )
    for step in range(STEPS):
        torch.manual_seed(STEPS * rank + step)
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().sum().backward()
        optimizer.step()
    figures = bytesched.stats(optimizer)
    bytesched.unwrap(optimizer)
    return [parameter.detach().clone() for parameter in model.parameters()], figures


def _all_reduce_ms(rank: int, size_bytes: int) -> float:
    best_ms = float("inf")
    for _ in range(ROUNDS):
        tensor = torch.full((size_bytes // 4,), rank + 1, dtype=torch.float32)
        start_ns = time.perf_counter_ns()
        dist.all_reduce(tensor)
        best_ms = min(best_ms, (time.perf_counter_ns() - start_ns) / 1e6)
        expected = sum(range(1, WORLD_SIZE + 1))
        if not bool((tensor == expected).all()):
            raise ArithmeticError(f"the sum over the ranks is {tensor[0].item()}, not {expected}")
    return best_ms


def main(argv: Sequence[str]) -> int:
    """Run one command and return 0; a failure leaves as its own traceback."""
    if argv[0] == "backends":
        print(json.dumps(backends()))
        return 0
    command, rank, store, timeout_s = argv[0], int(argv[1]), Path(argv[2]), float(argv[3])
    dist.init_process_group(
        "gloo",
        init_method=store.as_uri(),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    try:
        answer = loopback(rank) if command == "loopback" else training(rank, timeout_s)
    finally:
        dist.destroy_process_group()
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
