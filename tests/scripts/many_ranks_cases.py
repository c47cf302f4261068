"""What each of many ranks does: it trains, says what it has, and trains on until one is gone."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from faults_cases import told, wrap
from faults_runner import tell
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bytesched

#: a warm-up and chunks enough that an order has something to order
LAYERS, WIDTH, STEPS = 12, 128, 3
SETTINGS = {"partition_bytes": 64 << 10, "credit_bytes": 256 << 10, "timeout_s": 90.0}
#: all train meanwhile
DIES_AFTER_S = 1.0


def train_until_one_dies(victim: int, fields: dict[str, Any], clips: bool) -> None:
    """Tell a digest of the weights after some steps; then rank `victim` dies at any moment."""
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wrap(optimizer, model, **SETTINGS, **fields)
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    for _ in range(STEPS):
        step()
    bytesched.flush()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    tell(weights=digest.hexdigest())

    def train_on() -> None:
        for _ in count():
            step()

    if dist.get_rank() == victim:
        dying = partial(os.kill, os.getpid(), signal.SIGKILL)
        threading.Timer(DIES_AFTER_S, dying).start()
    told(train_on)
