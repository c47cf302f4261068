"""One rank's training over a Loopback, beside the plain one it has to equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from loopback import Loopback
from torch import Tensor, nn
from torch.optim import Optimizer

from bytesched.plugins.planned.hooked_session import HookedSession

#: of every wait; none is ever waited out
TIMEOUT_S = 100.0
#: far below the size of one layer, so that every layer is cut
SMALL: dict[str, Any] = {"partition_bytes": 256, "credit_bytes": 512}

MakeOptimizer = Callable[[nn.Module], Optimizer]


def mlp() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def inputs(step: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


class Training:
    """A model and its optimizer; scheduled if there is a loopback."""

    def __init__(
        self, loopback: Loopback | None = None, optimizer_of: MakeOptimizer = sgd, **fields: Any
    ) -> None:
        self.model: Any = mlp()
        self.optimizer = optimizer_of(self.model)
        self.step_number = 0
        self.session: HookedSession = None  # type: ignore[assignment] # without a loopback
        if loopback is not None:
            self.session = loopback.wrap(self.model, self.optimizer, **{**SMALL, **fields})

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(inputs(self.step_number)).square().mean().backward()
        self.step_number += 1

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.backward()
            self.optimizer.step()

    def flush(self) -> None:
        if self.session is not None:
            self.session.flush()

    def crossed_steps(self) -> int:
        return int(self.session.stats()["barrier_crossed_steps"])


def check_equal(ours: Training, plain: Training) -> None:
    """Weights and optimizer state are the same, to the bit."""
    ours.flush()
    assert all(map(torch.equal, weights(plain.model), weights(ours.model)))
    theirs = plain.optimizer.state_dict()["state"]
    for number, state in ours.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            same = torch.equal(value, theirs[number][name]) if torch.is_tensor(value) else True
            assert same, (number, name)
