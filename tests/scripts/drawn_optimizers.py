"""Optimizers that training draws: known ones, one that is vouched for, and some that couple."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import hypot
from typing import Any

import numpy as np
import torch
from scripts_optimizers import SPLITTABLE
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import bytesched

Closure = Callable[[], Tensor]


class Own(Optimizer):
    """Gradient descent at a rate that classes below make depend on something."""

    def __init__(self, parameters: list[nn.Parameter], lr: float = 0.05, **more: Any) -> None:
        super().__init__(parameters, {"lr": lr} | more)

    def rate(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> float:
        return 1.0

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                parameters = [p for p in group["params"] if p.grad is not None]
                rate = scale * self.rate(group, parameters)
                for p in parameters:
                    self.update(p, -group["lr"] * rate)
        return loss

    def update(self, p: nn.Parameter, by: float) -> None:
        assert p.grad is not None
        p.add_(p.grad, alpha=by)

    def meddle(self, draw: random.Random) -> None:
        """What the script changes right after a step."""


class Threshold(Own):
    """Clips by a norm that no gradient reaches, until the script lowers it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, most=1e9)

    def rate(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> float:
        norm = hypot(*(float(p.grad.norm()) for p in parameters if p.grad is not None))
        return min(1.0, float(group["most"]) / (norm + 1e-6))

    def meddle(self, draw: random.Random) -> None:
        if draw.random() < 0.3:
            self.param_groups[0]["most"] = 0.01


class CallsBack(Own):
    """A callable in its group, over what the script changes."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.told = [1.0]
        super().__init__(parameters, schedule=lambda: self.told[0])

    def rate(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> float:
        return float(group["schedule"]())

    def meddle(self, draw: random.Random) -> None:
        self.told[0] = draw.choice((0.5, 1.0, 2.0))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for group in state["param_groups"]:
            group.pop("schedule")
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            group["schedule"] = lambda: self.told[0]
        super().load_state_dict(state_dict)


class Draws(Own):
    """Numbers of each global generator."""

    def update(self, p: nn.Parameter, by: float) -> None:
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
        super().update(p, by * drawn)


class Counts(Own):
    """Keeps a count, and returns how many parameters it has updated."""

    calls = 0

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        super().step(closure, scale)
        self.calls += 1
        return self.calls, sum(p.grad is not None for g in self.param_groups for p in g["params"])

    def rate(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> float:
        return 1 / (1 + self.calls)


class Normalised(AdamW):
    """Divides all weights by the greatest, after the update that it inherits."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            parameters = [p for group in self.param_groups for p in group["params"]]
            greatest = max(float(p.abs().max()) for p in parameters)
            for p in parameters:
                p.div_(1 + 0.01 * greatest)
        return loss


class Named(AdamW):
    """A subclass that changes nothing."""


@bytesched.separable
class Vouched(Optimizer):
    """The sign of a mean of gradients, for each parameter on its own."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.002, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    mean = state.setdefault("mean", torch.zeros_like(p))
                    p.add_(mean.lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                    mean.mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
        return loss


def _shadowed(parameters: list[nn.Parameter]) -> Optimizer:
    """A known class whose instance has a `step` of its own."""
    optimizer = SGD(parameters, lr=0.05, momentum=0.9)
    whole = optimizer.step

    def step(closure: Any = None) -> Any:
        loss = whole(closure)
        with torch.no_grad():
            torch._foreach_mul_([p for p in parameters if p.grad is not None], 0.999)
        return loss

    vars(optimizer)["step"] = step
    return optimizer


def _hooked(parameters: list[nn.Parameter]) -> Optimizer:
    """A known class with hooks that read a gradient and write a weight."""
    optimizer = AdamW(parameters, lr=0.01)

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (grad := parameters[0].grad) is not None:
            grad.mul_(0.5)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            parameters[-1].mul_(0.99)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


Make = Callable[[list[nn.Parameter]], Optimizer]
KINDS: tuple[type[Optimizer], ...] = (Own, Threshold, CallsBack, Draws, Counts, Normalised, Named)
#: makers of optimizers, by name
UNKNOWN: dict[str, Make] = {
    **{kind.__name__: kind for kind in KINDS},
    "shadowed": _shadowed,
    "hooked": _hooked,
    "LBFGS": lambda parameters: torch.optim.LBFGS(
        # No break that depends on the loss, of which each rank has its own.
        parameters,
        lr=0.1,
        max_iter=3,
        tolerance_change=-1.0,
    ),
}
VOUCHED: dict[str, Make] = {"Vouched": Vouched}


def made(name: str, parameters: list[nn.Parameter]) -> Optimizer:
    """An optimizer of that name, of those of torch, too."""
    if name in SPLITTABLE:
        kind, arguments = SPLITTABLE[name]
        return kind(parameters, **arguments)
    return (UNKNOWN | VOUCHED)[name](parameters)


def stepped(optimizer: Optimizer, closure: Closure | None, draw: random.Random) -> Any:
    """What `step()` returns, called with arguments that its class takes.

    Args:
        closure: None where the round has its only backward pass behind it.
    """
    step: Any = optimizer.step
    if isinstance(optimizer, torch.optim.LBFGS):
        return step(closure)
    how = draw.choice(("", "", "", "none", "closure", "closure_by_name", "scale", "both"))
    if how == "none":
        return step(None)
    if how == "closure" and closure is not None:
        return step(closure)
    if how == "closure_by_name":
        return step(closure=closure)
    if isinstance(optimizer, Own) and how == "scale":
        return step(scale=0.25)
    if isinstance(optimizer, Own) and how == "both":
        return step(draw.choice((None, closure)), 0.5)
    return step()
