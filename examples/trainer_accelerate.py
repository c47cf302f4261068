"""An Accelerate script, with one line added.

torchrun --nproc-per-node 2 examples/trainer_accelerate.py
BYTESCHED_ENABLED=0 torchrun --nproc-per-node 2 examples/trainer_accelerate.py   # the same weights
"""

import hashlib
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bytesched
from bytesched.integrations.accelerate import wrap


def train(
    accelerator: Accelerator, *, schedule: bool, clip: float = 0.0, **fields: Any
) -> tuple[str, dict[str, int | float | str]]:
    """Trains for one epoch; returns a digest of the weights, and the figures."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(1280, 256), torch.randint(10, (1280,))
    loader: Any = DataLoader(TensorDataset(inputs, targets), batch_size=32)

    prepared = accelerator.prepare(model, optimizer, loader)
    model, optimizer, loader = wrap(*prepared, **fields) if schedule else prepared

    for batch, target in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch), target)
            accelerator.backward(loss)
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()

    bytesched.flush()
    figures = bytesched.stats(optimizer)
    bytesched.unwrap(optimizer)
    digest = hashlib.sha256()
    for weight in accelerator.unwrap_model(model).state_dict().values():
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()[:16], figures


def main() -> None:
    accelerator = Accelerator(cpu=True)
    weights, figures = train(accelerator, schedule=True)
    if accelerator.is_main_process:
        print(f"weights {weights}")
        for name, value in figures.items():
            print(f"  {name} = {value}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
