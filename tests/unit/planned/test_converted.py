"""A model that is converted to another layout of memory in the middle of its training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loopback import Loopback
from torch import Tensor, nn


def convolutions() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(16, 4)
    )


def trained(loopback: Loopback | None, converted_at: int, *, before_step: bool) -> list[Tensor]:
    """All gradients and weights that a script sees that converts its model in the middle.

    Compared with plain training and not with DDP: torch 2.13's averages wrong once the strides of
    a gradient are not those that its buckets were made for.
    """
    model: Any = convolutions()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if loopback is not None:
        loopback.wrap(model, optimizer, partition_bytes=256, credit_bytes=512)
    seen: list[Tensor] = []
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        if step == converted_at and before_step:
            model.to(memory_format=torch.channels_last)
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        if step == converted_at and not before_step:
            model.to(memory_format=torch.channels_last)
        seen += [p.detach().clone() for p in model.parameters()]
    return seen


def strides_of(tensor: Tensor) -> list[int]:
    # A stride means nothing where there is one element.
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1]


@pytest.mark.parametrize("before_step", [True, False])
@pytest.mark.parametrize("converted_at", [0, 3])
def test_converted_to_channels_last(
    loopback: Loopback, converted_at: int, before_step: bool
) -> None:
    plain = trained(None, converted_at, before_step=before_step)
    ours = trained(loopback, converted_at, before_step=before_step)
    assert all(map(torch.equal, plain, ours))
    for one, other in zip(plain, ours, strict=True):
        assert strides_of(one) == strides_of(other)
