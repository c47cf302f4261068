"""Trains with plain DDP and with bytesched as it is installed: the weights have the same bits.

torchrun --standalone --nproc-per-node 2 released.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bytesched

STEPS = 10


def trained(*, wrapped: bool) -> list[Tensor]:
    """The weights after some steps; each rank has data of its own."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if wrapped:
        optimizer = bytesched.wrap(optimizer, model)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        inputs, targets = torch.randn(16, 256), torch.randint(10, (16,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    if wrapped:
        bytesched.flush()
        assert bytesched.stats(optimizer)["steps"] == STEPS
        bytesched.unwrap(optimizer)
    return [parameter.detach().clone() for parameter in model.parameters()]


def main() -> None:
    assert Path(bytesched.__file__).is_relative_to(sys.prefix), bytesched.__file__
    dist.init_process_group("gloo")
    plain = trained(wrapped=False)
    ours = trained(wrapped=True)
    assert all(map(torch.equal, plain, ours)), "the weights differ from those of plain DDP"
    dist.barrier()
    if dist.get_rank() == 0:
        print(
            f"bytesched {bytesched.__version__}, torch {torch.__version__}: two ranks have the "
            f"weights of plain DDP, bit for bit, after {STEPS} steps"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
