"""Torch trained through a store within one process: numbers and figures."""

from __future__ import annotations

import threading

import pytest
import torch
from fake_wire import inputs, mlp, sgd
from together import TIMEOUT_S
from torch import nn
from training import SMALL

from bytesched.config import Config
from bytesched.kvstore import LocalKVStore
from bytesched.plugins.stores.training import begin as kvstore_training

STEPS = 5


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_rounded: bool = False) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        for parameter in model.parameters() if is_rounded else ():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.bfloat16().float()
        optimizer.step()


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_it_has_the_bits_of_plain_training(compression: str) -> None:
    """Compressed, of training with gradients that are rounded."""
    plain, model = mlp(), mlp()
    train(plain, sgd(plain.parameters()), is_rounded=compression != "none")
    config = Config(timeout_s=TIMEOUT_S, compression=compression, **SMALL)
    optimizer = sgd(model.parameters())
    session = kvstore_training.attach(optimizer, model, LocalKVStore(), config)
    train(model, optimizer)
    assert [thread.name for thread in threading.enumerate()].count("bytesched-scheduler") == 1
    session.flush()
    stats = session.stats()
    session.close()
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert (stats["mode"], stats["order"]) == ("cross", "each worker's own")
    assert float(stats["chunks"]) > 4
    assert float(stats["comm_ms"]) > 0
    assert float(stats["scheduler_cpu_us_per_chunk"]) > 0
