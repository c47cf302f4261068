"""A DistributedDataParallel script with one line added.

torchrun --nproc-per-node 2 examples/ddp.py
BYTESCHED_ENABLED=0 torchrun --nproc-per-node 2 examples/ddp.py   # the same loss without it
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bytesched


def train() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 10))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = bytesched.wrap(optimizer, model)

    torch.manual_seed(dist.get_rank())
    inputs, targets = torch.randn(64, 256), torch.randint(10, (64,))
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

    if dist.get_rank() == 0:
        print(f"loss {loss.item():.10f}")
        for name, value in bytesched.stats(optimizer).items():
            print(f"  {name} = {value}")
    bytesched.unwrap(optimizer)


def main() -> None:
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
