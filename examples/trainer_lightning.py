"""Lightning's Trainer, with one callback added.

torchrun --nproc-per-node 2 examples/trainer_lightning.py
BYTESCHED_ENABLED=0 torchrun --nproc-per-node 2 examples/trainer_lightning.py   # the same weights
"""

import hashlib
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bytesched.integrations.lightning import SchedulingCallback


class Classifier(pl.LightningModule):  # type: ignore[misc]
    """Three layers, and a module of Lightning's around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(model: pl.LightningModule, *callbacks: pl.Callback, **options: Any) -> str:
    """Trains ``model`` for one epoch, and returns a digest of its weights."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1280, 256, generator=generator)
    targets = torch.randint(10, (1280,), generator=generator)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, DataLoader(TensorDataset(inputs, targets), batch_size=32))
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    torch.manual_seed(0)
    callback = SchedulingCallback()
    weights = train(Classifier(), callback)
    if torch.distributed.get_rank() == 0:
        print(f"weights {weights}")
        for name, value in callback.stats.items():
            print(f"  {name} = {value}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
