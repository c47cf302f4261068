"""Run by mpirun on every rank: ways of opening a store keep the contract, or train a model."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import sys
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

from bytesched.config import Config
from bytesched.kvstore import Key, KVStore
from bytesched.plugins.mpi_kvstore import open_store
from bytesched.plugins.stores.scheduled import ScheduledKVStore
from bytesched.plugins.stores.training import begin as kvstore_training
from bytesched.plugins.stores.training.begin import push_bytes_per_s
from bytesched.plugins.stores.training.wire import StoreWire
from bytesched.testing import KVStoreContract

STEPS = 8
#: sums over the batch are taken in another order
TOLERANCE = 1e-12
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)
    ).double()


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (
            torch.randn(4, 6, generator=generator, dtype=torch.float64),
            torch.randn(4, 3, generator=generator, dtype=torch.float64),
        )
        for _ in range(STEPS)
    ]


def train(model: nn.Module, optimizer: Any, data: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for inputs, targets in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()


def alone(kind: str, workers: int) -> dict[str, Any]:
    model = model_of(0)
    joined = [
        (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        for parts in zip(*(batches(rank) for rank in range(workers)), strict=True)
    ]
    train(model, OPTIMIZERS[kind](model.parameters()), joined)
    return model.state_dict()


def run(kind: str, options: dict[str, Any]) -> None:
    given = {"partition_bytes": 2048, "credit_bytes": 4096}
    sizes: dict[str, Any] = {} if options.pop("measured", False) else given
    kv = open_store(timeout_s=100, **options)
    # Worker 0's parameters hold for all.
    model = model_of(kv.rank)
    optimizer = OPTIMIZERS[kind](model.parameters())
    config = Config(timeout_s=100, **sizes)
    session = kvstore_training.attach(optimizer, model, kv, config)
    train(model, optimizer, batches(kv.rank))
    session.flush()
    stats = session.stats()
    assert stats["mode"] == ("store" if kv.updates else "cross"), stats
    if sizes:
        assert float(stats["chunks"]) > 4, stats
        assert float(stats["barrier_crossed_steps"]) > 0, stats
    expected = alone(kind, kv.num_workers)
    for name, value in model.state_dict().items():
        error = (value - expected[name]).abs().max().item()
        assert error < TOLERANCE, (kind, name, error)
    if kv.updates:
        assert not optimizer.state, "the workers have no state of their own"
    session.close()
    if not sizes and not kv.updates:
        again = StoreWire(kv, name="again", config=config)
        assert all(push_bytes_per_s(again, kv.num_servers) > 0 for _ in range(3))
        again.close()
    kv.close()


class Suite(KVStoreContract):
    def __init__(self, options: dict[str, Any], *, scheduled: bool) -> None:
        self.options = options
        self.scheduled = scheduled

    def store(self) -> KVStore:
        kv = open_store(timeout_s=100, **self.options)
        if self.scheduled:
            return ScheduledKVStore(kv, Config(timeout_s=100, partition_bytes=16))
        return kv

    def array(self, numbers: list[float]) -> Any:
        return torch.tensor(numbers)

    def numbers(self, array: Any) -> list[float]:
        return [float(number) for number in array]

    def wait(self, kv: KVStore, key: Key) -> None:
        if isinstance(kv, ScheduledKVStore):
            kv.wait(key)


def keeps_the_contract(options: dict[str, Any]) -> None:
    scheduled = options.pop("scheduled", False)
    for name in dir(Suite):
        if name.startswith("test_"):
            # Before a call's limit: a rank that is silent for so long shows where it is.
            faulthandler.dump_traceback_later(90)
            # A server ends with it.
            with contextlib.suppress(SystemExit):
                getattr(Suite(options, scheduled=scheduled), name)()
            faulthandler.cancel_dump_traceback_later()


def trains(options: dict[str, Any]) -> None:
    for kind in OPTIMIZERS:
        with contextlib.suppress(SystemExit):
            run(kind, dict(options))


if __name__ == "__main__":
    for options in json.loads(sys.argv[2]):
        globals()[sys.argv[1]](options)
    print(f"rank {MPI.COMM_WORLD.rank}: done", flush=True)
