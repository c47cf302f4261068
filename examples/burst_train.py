"""Layers on as many ranks as a plan gives them, and another job in the gaps.

torchrun --nproc-per-node 4 examples/burst_train.py
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from bytesched.burst.cost import Place, Plan
from bytesched.plugins.burst import Background, Burst

BATCH = 32
STEPS = 30


def classifier() -> nn.Sequential:
    """Convolutions that scale, and layers behind them that do not."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(2048, 64), nn.ReLU()),
        nn.Linear(64, 10),
    )


def wide_then_narrow(ranks: int) -> Plan:
    """Convolutions on all ranks, the rest on one; `bytesched burst plan` finds such plans."""
    return (Place(0, ranks), Place(0, ranks), Place(0, 1), Place(0, 1))


class SmallJob:
    """Another job, in steps of a few hundred microseconds; its random numbers are its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.model = nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loss = float("nan")

    def step(self) -> None:
        """One step."""
        x = torch.randn(16, 8, generator=self.generator)
        loss = mse_loss(self.model(x), x.mean(1, keepdim=True))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    make_optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    job = SmallJob()
    plan = wide_then_narrow(dist.get_world_size())
    with (
        Background(job.step) as background,
        Burst(classifier(), plan, make_optimizer, cross_entropy) as burst,
    ):
        burst.share(background)
        losses = [burst.step(images, labels) for _ in range(STEPS)]
        burst.gather()
    if losses[-1] is not None:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    ran = torch.tensor([background.steps])
    dist.all_reduce(ran)
    if dist.get_rank() == 0:
        print(f"background steps {ran.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
