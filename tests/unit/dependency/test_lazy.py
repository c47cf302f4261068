"""Where gradients lie: the arena's memory, or that in which the script looks for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bytesched.errors import PluginError
from bytesched.plugins.dependency.lazy import withhold
from bytesched.plugins.layout.memory import is_laid_out_as
from bytesched.plugins.layout.slots import Slot
from bytesched.testing import Loopback


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


@pytest.mark.parametrize("before_step", [True, False])
@pytest.mark.parametrize("converted_at", [0, 3])
def test_converted_to_channels_last(
    loopback: Loopback, converted_at: int, before_step: bool
) -> None:
    plain = trained(None, converted_at, before_step=before_step)
    ours = trained(loopback, converted_at, before_step=before_step)
    assert all(map(torch.equal, plain, ours))
    # A stride means nothing where there is one element.
    assert all(map(is_laid_out_as, plain, ours))


def test_in_a_forked_child_no_memory_of_a_withheld_gradient_is_touched() -> None:
    slot = Slot("p", nn.Parameter(torch.zeros(3, 4)))
    slot.view = torch.ones(3, 4)

    def refuse() -> None:
        raise PluginError("not here")

    slot.make_lazy(refuse)
    slot.parameter.grad = slot.lazy
    withhold(slot, refuse)
    assert torch.equal(slot.view, torch.ones(3, 4))
    with pytest.raises(PluginError, match="not here"):
        slot.lazy.sum()
    slot.lazy.zero_()
    assert torch.equal(slot.lazy, torch.zeros(3, 4))
