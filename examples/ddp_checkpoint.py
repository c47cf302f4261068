"""A DistributedDataParallel script that knows nothing of bytesched: epochs, evaluation, snapshots.

torchrun --nproc-per-node 2 examples/ddp_checkpoint.py
torchrun --nproc-per-node 2 -m bytesched run examples/ddp_checkpoint.py   # the same weights
Started again with the same snapshot, it goes on where it ended.
"""

import argparse
import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXAMPLES, FEATURES, CLASSES = 512, 64, 10


def dataset(seed: int) -> TensorDataset:
    """Points around one centre per class."""
    centres = 0.4 * torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
    return TensorDataset(
        centres[labels] + torch.randn(EXAMPLES, FEATURES, generator=generator), labels
    )


class Trainer:
    """A model with all that a snapshot has to hold."""

    def __init__(self, snapshot: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(FEATURES, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, CLASSES)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.7)
        self.epoch = 0
        self.snapshot = snapshot
        if snapshot.exists():
            self.restore()
        self.ddp = DistributedDataParallel(self.model)
        self.sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset(1))
        self.batches = DataLoader(dataset(1), batch_size=32, sampler=self.sampler, num_workers=1)

    def save(self) -> None:
        state = {
            "epoch": self.epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        torch.save(state, self.snapshot)

    def restore(self) -> None:
        state = torch.load(self.snapshot)
        self.epoch = state["epoch"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def train_epoch(self) -> None:
        self.ddp.train()
        self.sampler.set_epoch(self.epoch)
        for inputs, labels in self.batches:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.ddp(inputs), labels).backward()
            nn.utils.clip_grad_norm_(self.ddp.parameters(), 5.0)
            self.optimizer.step()
        self.schedule.step()
        self.epoch += 1

    @torch.no_grad()
    def accuracy(self) -> float:
        self.model.eval()
        inputs, labels = dataset(2).tensors
        right: torch.Tensor = self.model(inputs).argmax(1) == labels
        return right.float().mean().item()

    def digest(self) -> str:
        """A short name for all the weights and buffers."""
        values = [value.numpy().tobytes() for value in self.model.state_dict().values()]
        return hashlib.sha256(b"".join(values)).hexdigest()[:16]


def train(epochs: int, snapshot: Path) -> None:
    trainer = Trainer(snapshot)
    while trainer.epoch < epochs:
        trainer.train_epoch()
        if dist.get_rank() == 0:
            trainer.save()
            print(f"epoch {trainer.epoch}: accuracy {trainer.accuracy():.3f}")
    if dist.get_rank() == 0:
        print(f"weights {trainer.digest()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"))
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    train(arguments.epochs, arguments.snapshot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
