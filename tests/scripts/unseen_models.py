"""Models whose weights are read where no tensor subclass can see it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from scripts_models import Attention, Checkpointed, RawLinear, encoder, read_raw
from torch import Tensor, nn


class RawRoot(nn.Module):
    """Parameters of its own, beside a child, that only a compiled kernel reads."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(8, 8) / 3)
        self.address = self.own.data_ptr()
        self.child = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.child(read_raw(x, self.own, self.address))


class RawChildWeight(nn.Module):
    """Hands a child's weight to a kernel; the child itself is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(8, 8, bias=False)
        self.address = self.child.weight.data_ptr()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(read_raw(x, self.child.weight, self.address))


class RawList(nn.Module):
    """Hands the items of a ParameterList to a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2)])
        self.addresses = [item.data_ptr() for item in self.items]

    def forward(self, x: Tensor) -> Any:
        for item, address in zip(self.items, self.addresses, strict=True):
            x = read_raw(x, item, address)
        return x


class RawTied(nn.Module):
    """One weight under two names, read by a kernel in both places."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = RawLinear(8, 8), RawLinear(8, 8)
        self.other.weight = self.one.weight
        self.other.address = self.one.address

    def forward(self, x: Tensor) -> Any:
        return self.other(torch.tanh(self.one(x)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "leaf": lambda: nn.Sequential(RawLinear(8, 8), nn.Linear(8, 4)),
    "root": RawRoot,
    "child_weight": RawChildWeight,
    "parameter_list": RawList,
    "tied": RawTied,
    "attention": Attention,
    "encoder_layer": lambda: nn.Sequential(nn.Unflatten(1, (1, 8)), encoder()),
    "compiled": lambda: nn.Sequential(compiled(nn.Linear(8, 8))),
    "compiled_in_place": lambda: compiled_in_place(nn.Sequential(nn.Linear(8, 8), nn.Tanh())),
    "scripted": lambda: nn.Sequential(scripted(nn.Linear(8, 8)), nn.Linear(8, 4)),
    "checkpoint": lambda: Checkpointed(reentrant=False),
}


def scripted(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


def compiled(module: nn.Module, **arguments: Any) -> Any:
    return torch.compile(module, backend="eager", **arguments)


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module
