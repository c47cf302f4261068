"""Ray Train's TorchTrainer, with one line added.

python examples/trainer_ray.py        # on a cluster of its own, on this machine
BYTESCHED_ENABLED=0 python examples/trainer_ray.py   # the same weights
"""

import hashlib
import tempfile
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import bytesched


def train(settings: dict[str, Any]) -> None:
    """What each worker runs."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    model = ray.train.torch.prepare_model(layers)
    optimizer = bytesched.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    generator = torch.Generator().manual_seed(ray.train.get_context().get_world_rank())
    for _ in range(settings["steps"]):
        inputs = torch.randn(32, 256, generator=generator)
        targets = torch.randint(10, (32,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        if settings["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()
    bytesched.flush()
    figures = bytesched.stats(optimizer)
    # Here and not when the worker ends, which Ray does from outside.
    bytesched.unwrap(optimizer)
    digest = hashlib.sha256()
    for weight in layers.state_dict().values():
        digest.update(weight.numpy().tobytes())
    ray.train.report({"weights": digest.hexdigest()[:16], **figures})


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"steps": 40, "clip": 0.0},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(storage_path=folder),
        )
        metrics: dict[str, Any] = trainer.fit().metrics or {}
    print(f"weights {metrics.pop('weights')}")
    for name, value in metrics.items():
        print(f"  {name} = {value}")


if __name__ == "__main__":
    main()
