"""What one gradient goes through: functions of ours that are called for each chunk."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from statistics import median_low
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bytesched

#: two models, one with as many chunks more, and as many bundles
_CHUNKS = 32
_WIDTH = 32
#: rounds before those that are followed: by then there is a plan
_SETTLED = 40
#: rounds that are followed: what few of them call is chance
_FOLLOWED = 5
_OURS = Path(bytesched.__file__).parent


def functions_of_a_chunk(in_ddp: bool) -> dict[str, list[str]]:
    """Those called once more for each chunk more, from its hook to its update, by file."""
    few, many = _called(_CHUNKS, in_ddp=in_ddp), _called(2 * _CHUNKS, in_ddp=in_ddp)
    found: dict[str, list[str]] = {}
    for name, calls in many.items():
        # A few waits more or less are chance.
        if calls - few[name] >= 0.8 * _CHUNKS:
            file, function = name
            found.setdefault(file, []).append(function)
    return found


def _called(chunks: int, *, in_ddp: bool) -> Counter[tuple[str, str]]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(chunks)))
    if in_ddp:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # A bucket for each layer.
    optimizer = bytesched.wrap(optimizer, model, guard=False, partition_bytes=4 * _WIDTH**2)
    inputs = torch.randn(4, _WIDTH)

    def train() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(_SETTLED):
        train()
    calls: Counter[tuple[str, str]]

    def profile(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(_OURS):
            calls[str(path.relative_to(_OURS)), frame.f_code.co_name] += 1

    followed: list[Counter[tuple[str, str]]] = []
    for _ in range(_FOLLOWED):
        followed.append(calls := Counter())
        sys.setprofile(profile)
        try:
            train()
            model(inputs)
        finally:
            sys.setprofile(None)
    bytesched.unwrap(optimizer)
    names = {name for calls in followed for name in calls}
    return Counter({name: median_low([calls[name] for calls in followed]) for name in names})
