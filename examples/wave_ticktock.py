"""Training in waves: the second half of the batch runs forward beside the first half's backward.

python examples/wave_ticktock.py                               # one process
torchrun --nproc-per-node 2 examples/wave_ticktock.py          # the same under DDP
python examples/wave_ticktock.py --accumulate                  # the same loss, without waves
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.plugins.wave import TickTock


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def accumulate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
) -> float:
    """What the waves do, one after another."""
    optimizer.zero_grad()
    parts = list(zip(*(t.chunk(2) for t in batch), strict=True))
    losses = []
    for number, part in enumerate(parts):
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = number == len(parts) - 1
        loss = loss_fn(model, part) / 2
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    return float(torch.stack(losses).sum())


def train(*, distributed: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Embedding(100, 64), nn.Flatten(), nn.Linear(32 * 64, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank = dist.get_rank() if distributed else 0
    torch.manual_seed(rank)
    batch = (torch.randint(100, (16, 32)), torch.randint(10, (16,)))

    waves = None if "--accumulate" in sys.argv else TickTock(model, optimizer, loss_fn)
    for _ in range(20):
        loss = waves.step(batch).item() if waves else accumulate(model, optimizer, batch)

    if rank == 0:
        print(f"loss {loss:.10f}")
    if waves:
        if rank == 0:
            for name, value in waves.stats().items():
                print(f"  {name} = {value}")
        waves.close()


def main() -> None:
    distributed = dist.is_torchelastic_launched()
    if distributed:
        dist.init_process_group("gloo")
    train(distributed=distributed)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
