"""Models whose gradients hooks take: what cannot be summed is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from loopback import Loopback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bytesched.errors import PluginError


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    loopback = Loopback()
    yield loopback
    loopback.close()


def linear() -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(4, 4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()


def test_a_gradient_of_another_dtype_is_refused_by_its_name(loopback: Loopback) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = loopback.wrap(model, optimizer)
    train(model, optimizer, 3)
    session.flush()
    model.double()
    with pytest.raises(PluginError, match=r"'bias' is torch.float64 on cpu, it was torch.float32"):
        train(model, optimizer, 1)
    session.close()


def test_a_second_gradient_in_one_round_is_refused_by_its_name(loopback: Loopback) -> None:
    class Twice(nn.Module):
        """One layer in two reentrant checkpoints, and another one in front, which is last."""

        def __init__(self) -> None:
            super().__init__()
            self.front, self.shared = linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            x = self.front(x)
            for _ in range(2):
                x = checkpoint(self.shared, x, use_reentrant=True)
            return x

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = loopback.wrap(model, optimizer)
    with pytest.raises(PluginError, match=r"'shared\.\w+' got a second gradient in one round"):
        train(model, optimizer, 1)
    session.close()
