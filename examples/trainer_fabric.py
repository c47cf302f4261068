"""Lightning Fabric, with one line added.

torchrun --nproc-per-node 2 examples/trainer_fabric.py
BYTESCHED_ENABLED=0 torchrun --nproc-per-node 2 examples/trainer_fabric.py   # the same weights
"""

import argparse
import hashlib
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bytesched


def train(
    fabric: Fabric, *, clip: float = 0.0, **fields: Any
) -> tuple[str, dict[str, int | float | str]]:
    """Trains for one epoch; returns a digest of the weights, and the figures."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    model: Any
    model, optimizer = fabric.setup(layers, torch.optim.AdamW(layers.parameters(), lr=1e-3))
    inputs, targets = torch.randn(1280, 256), torch.randint(10, (1280,))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(inputs, targets), batch_size=32))

    # The shell of Fabric's is around this, which is the DistributedDataParallel.
    bytesched.wrap(optimizer, model._forward_module, **fields)

    for batch, target in loader:
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(batch), target))
        if clip:
            fabric.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()

    bytesched.flush()
    figures = bytesched.stats(model._forward_module)
    bytesched.unwrap(model._forward_module)
    digest = hashlib.sha256()
    for weight in layers.state_dict().values():
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()[:16], figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clip", type=float, default=0.0, metavar="NORM")
    clip = parser.parse_args().clip
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    weights, figures = train(fabric, clip=clip)
    fabric.print(f"weights {weights}")
    for name, value in figures.items():
        fabric.print(f"  {name} = {value}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
