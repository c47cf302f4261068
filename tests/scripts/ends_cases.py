"""A training that ends well, in ways that are drawn from a seed, while its ranks are busy."""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bytesched

#: Where nothing is stopped, nothing waits as long as that.
_TIMEOUT_S = 120.0

_ENDS = ("falls off", "destroys", "exits", "unwraps", "unwraps and destroys")

_MOMENTS = ("before clipping", "before step", "after step", "before end", "after end")


def ends_well(seed: str, options: dict[str, Any]) -> None:
    """Trains some rounds and ends; prints what it has trained."""
    draw = random.Random(seed)
    alone = random.Random(f"{seed} {dist.get_rank()}")
    # Also in rounds with a vote, and before there is anything to split.
    rounds, clips = draw.choice((1, 2, 3, 4, 6, 8)), draw.random() < 0.8
    late = {moment for moment in _MOMENTS if alone.random() < 0.25}
    torch.manual_seed(draw.randrange(1 << 30))
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters())
    bytesched.wrap(optimizer, ddp, timeout_s=_TIMEOUT_S, **options)

    def pass_(moment: str) -> None:
        if moment in late and step == rounds - 1:
            time.sleep(0.2 * alone.random())

    for step in range(rounds):
        optimizer.zero_grad()
        ddp(torch.randn(8, 32)).square().mean().backward()
        if step == rounds - 1:
            for _ in range(alone.choice((0, 0, 2, 6))):
                threading.Thread(target=_spin, daemon=True).start()
        pass_("before clipping")
        if clips:
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        pass_("before step")
        optimizer.step()
        pass_("after step")
    if draw.random() < 0.7:
        print(*(float(p.detach().double().sum()) for p in model.parameters()), flush=True)
    pass_("before end")
    end = draw.choice(_ENDS)
    if "unwraps" in end:
        bytesched.unwrap(optimizer)
    if "destroys" in end:
        dist.destroy_process_group()
    pass_("after end")
    if end == "exits":
        sys.exit(0)


def _spin() -> None:
    """Keeps this rank's other threads from running for a while."""
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        pass
