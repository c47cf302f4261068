"""A DistributedDataParallel script that starts its own ranks, and knows nothing of bytesched.

python examples/ddp_spawn.py
python -m bytesched run examples/ddp_spawn.py   # the same weights
"""

import hashlib
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

WORLD_SIZE, STEPS = 2, 12


class Generator(nn.Module):
    """Makes points of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 2))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.layers(noise)  # type: ignore[no-any-return]


class Critic(nn.Module):
    """Tells made points from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.layers(points)  # type: ignore[no-any-return]


def train(rank: int) -> None:
    """Two models, each with an optimizer of its own, against each other."""
    torch.manual_seed(0)
    generator = DistributedDataParallel(Generator())
    critic = DistributedDataParallel(Critic())
    generator_steps = torch.optim.Adam(generator.parameters(), lr=1e-3)
    critic_steps = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    real, made = torch.ones(32, 1), torch.zeros(32, 1)
    loss = nn.BCEWithLogitsLoss()

    torch.manual_seed(rank)
    for _ in range(STEPS):
        points = torch.randn(32, 2) * 0.1 + 1.0
        noise = torch.randn(32, 16)

        critic_steps.zero_grad()
        both = torch.cat([points, generator(noise).detach()])
        loss(critic(both), torch.cat([real, made])).backward()
        critic_steps.step()

        generator_steps.zero_grad()
        critic.requires_grad_(False)
        loss(critic(generator(noise)), real).backward()
        critic.requires_grad_(True)
        generator_steps.step()

    if rank == 0:
        weights = [
            p.detach().numpy().tobytes() for m in (generator, critic) for p in m.parameters()
        ]
        print(f"weights {hashlib.sha256(b''.join(weights)).hexdigest()[:16]}")


def run_rank(rank: int, port: int) -> None:
    """One rank, from joining the others to leaving them."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE
    )
    train(rank)
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(run_rank, args=(port,), nprocs=WORLD_SIZE)


if __name__ == "__main__":
    main()
