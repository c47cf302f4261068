"""Sixteen ranks: they start, stay equal, and every one names the rank that was killed.

Their all-reduces are whole, with and without clipping, or the first half of a sharded update.
"""

from __future__ import annotations

import hashlib
import threading
from contextlib import closing
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults_cases import FAULTS, told, wrap
from faults_fixtures import check_told_of
from faults_runner import Runs, Scenario, tell
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bytesched

RANKS, VICTIM = 16, 8
#: a warm-up and chunks enough that an order has something to order
LAYERS, WIDTH, STEPS = 12, 128, 3
SETTINGS = {"partition_bytes": 64 << 10, "credit_bytes": 256 << 10, "timeout_s": 90.0}
#: all train meanwhile
DIES_AFTER_S = 1.0


def train_until_one_dies(fields: dict[str, Any], clips: bool) -> None:
    """Tell a digest of the weights after some steps; then one rank dies at any moment."""
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wrap(optimizer, model, **SETTINGS, **fields)
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())

    def train() -> None:
        for step in count():
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            if step == STEPS:
                bytesched.flush()
                weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
                tell(weights=hashlib.sha256(weights).hexdigest())
                if dist.get_rank() == VICTIM:
                    threading.Timer(DIES_AFTER_S, FAULTS["kill"]).start()

    told(train)


@pytest.mark.parametrize(
    ("fields", "clips"),
    [({}, False), ({}, True), ({"shard": True}, False)],
    ids=["whole", "clipped", "sharded"],
)
@pytest.mark.nightly
def test_sixteen_ranks_train_alike_and_name_the_one_that_dies(
    fields: dict[str, Any], clips: bool
) -> None:
    scenario = Scenario("many", train_until_one_dies, (fields, clips), world_size=RANKS)
    with closing(Runs([scenario])) as runs:
        ends = runs.of(scenario)
    assert len({end.told.get("weights") for end in ends}) == 1
    died = ends.pop(VICTIM)
    assert (died.code, died.hung) == (-9, False), died.stderr
    assert "weights" in died.told
    for survivor in ends:
        check_told_of(survivor, {"PeerLost"})
        assert f"rank {VICTIM}" in survivor.told["message"]
