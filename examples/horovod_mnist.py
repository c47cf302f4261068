"""A Horovod script that knows nothing of bytesched: a small network learns made-up digits.

horovodrun --gloo -np 2 python examples/horovod_mnist.py
horovodrun --gloo -np 2 python -m bytesched run examples/horovod_mnist.py   # the same weights
Under mpirun likewise: mpirun -np 2 python -m bytesched run examples/horovod_mnist.py
"""

import argparse
import hashlib

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXAMPLES, SIDE, CLASSES = 512, 14, 10


def digits(seed: int) -> TensorDataset:
    """Noisy copies of one picture per class."""
    pictures = torch.rand(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
    noise = 0.2 * torch.randn(EXAMPLES, 1, SIDE, SIDE, generator=generator)
    return TensorDataset(pictures[labels] - 0.5 + noise, labels)


class Network(nn.Module):
    """Two convolutions and two linear layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.decide = nn.Sequential(
            nn.Flatten(), nn.Linear(16 * 25, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, CLASSES)
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.decide(self.look(pictures))  # type: ignore[no-any-return]


def accuracy(model: nn.Module) -> float:
    """The share of unseen digits that are recognised, over all ranks."""
    model.eval()
    pictures, labels = digits(2).tensors
    mine = slice(hvd.rank(), None, hvd.size())
    with torch.no_grad():
        right = (model(pictures[mine]).argmax(1) == labels[mine]).float().mean()
    return float(hvd.allreduce(right, name="accuracy"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--fp16-allreduce", action="store_true")
    arguments = parser.parse_args()

    hvd.init()
    torch.manual_seed(hvd.rank())
    torch.set_num_threads(1)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    compression = hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    training = digits(1)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        training, num_replicas=hvd.size(), rank=hvd.rank()
    )
    for epoch in range(arguments.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for pictures, labels in DataLoader(training, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pictures), labels).backward()
            optimizer.step()
        reached = accuracy(model)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: accuracy {reached:.3f}")

    if hvd.rank() == 0:
        weights = [value.numpy().tobytes() for value in model.state_dict().values()]
        print(f"weights {hashlib.sha256(b''.join(weights)).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
