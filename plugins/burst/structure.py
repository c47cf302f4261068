"""A model with branches, and a plan of it, item by item."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from bytesched.burst.cost import Place, PlacedBranches, Plan
from bytesched.burst.planfile import load_named_plan
from bytesched.errors import PluginError


def _sum(outputs: Sequence[Tensor]) -> Tensor:
    return reduce(add, outputs)


def _concatenation(outputs: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(outputs), dim=1)


class Branched(nn.Module):
    """Sequences that read the same tensor; their outputs are joined. An empty one is a shortcut.

    Args:
        join: "sum", or "concat" along the channels.
    """

    def __init__(self, *branches: nn.Sequential, join: str = "sum") -> None:
        super().__init__()
        joins: dict[str, Callable[[Sequence[Tensor]], Tensor]]
        joins = {"sum": _sum, "concat": _concatenation}
        if join not in joins:
            raise ValueError(f"join {join!r}: one of {', '.join(joins)}")
        self.branches = nn.ModuleList(branches)
        self.join = joins[join]

    def forward(self, x: Tensor) -> Tensor:
        """The joined outputs of all branches."""
        return self.join([branch(x) for branch in self.branches])


#: a layer or branches, where it is, and its name
Item = tuple[nn.Module, Place | PlacedBranches, str]


def plan_for(model: nn.Sequential, path: str | Path) -> Plan:
    """The plan in a file, for a model that was recorded with `bytesched bench --record`.

    A profile names the modules that hold parameters. A child of the model that holds several of
    them is where the widest of these is; one that holds none is where the child before it is.
    A plan with branches or with other names throughout, but of the same length, is taken item by
    item.
    Raises `PluginError` if some of the names are not those of the model, and what
    `load_named_plan` raises.
    """
    named = load_named_plan(path)
    found: list[Place | None] = []
    known = 0
    for child, _ in model.named_children():
        places = [
            placed
            for name, placed in named
            if isinstance(placed, Place) and (name == child or name.startswith(f"{child}."))
        ]
        known += len(places)
        widest = max(places, key=lambda place: place.width, default=None)
        found.append(widest or (found[-1] if found else None))
    recorded = known and all(isinstance(placed, Place) for _, placed in named)
    if not recorded and len(named) == len(model):
        return tuple(placed for _, placed in named)
    first = next((place for place in found if place is not None), None)
    if first is None or known < len(named):
        raise PluginError(
            f"{path} has {len(named)} layers, {known} of which are named as in the model: it is "
            "the plan of another one"
        )
    return tuple(place or first for place in found)


def check(model: nn.Sequential, plan: Plan, size: int) -> None:
    """Raises PluginError for what cannot be run by a plan on ``size`` ranks."""
    if not plan or not isinstance(plan[0], Place):
        raise PluginError("the plan has no layer to begin with: a model begins with a layer")
    for place, name in places_of(items_of(model, plan, "")):
        if place.first + place.width > size:
            raise PluginError(
                f"{name} is planned for ranks {place.first} to {place.first + place.width - 1}"
                f", and there are {size} ranks"
            )
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise PluginError(f"a plan runs on the CPU, and the model is on {sorted(devices)}")
    owners: dict[int, str] = {}
    for module, _, name in layers_of(items_of(model, plan, "")):
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                raise PluginError(
                    f"{name} has {type(part).__name__}, which normalises over the samples of "
                    "one rank, and a plan changes how many these are: use nn.GroupNorm"
                )
        for parameter in module.parameters():
            if owners.setdefault(id(parameter), name) != name:
                raise PluginError(
                    f"{owners[id(parameter)]} and {name} share a parameter, and a parameter "
                    "lives with one layer"
                )


def items_of(chain: nn.Sequential, plan: Plan, prefix: str) -> Iterator[Item]:
    """The items of a chain with their places. Raises PluginError if the plan is another's."""
    if len(chain) != len(plan):
        raise PluginError(
            f"the plan has {len(plan)} layers for {prefix or 'the model'}, which has {len(chain)}"
        )
    for (name, module), placed in zip(chain.named_children(), plan, strict=True):
        if isinstance(module, Branched) is isinstance(placed, Place):
            raise PluginError(f"{prefix}{name}: branches where the plan has a layer, or reverse")
        if isinstance(placed, PlacedBranches):
            assert isinstance(module, Branched)
            if len(module.branches) != len(placed.branches):
                raise PluginError(
                    f"the plan has {len(placed.branches)} branches for {prefix}{name}, which has "
                    f"{len(module.branches)}"
                )
        yield module, placed, f"{prefix}{name}"


def layers_of(items: Iterable[Item]) -> Iterator[tuple[nn.Module, Place, str]]:
    """Every layer with its place, also those in branches."""
    for module, placed, name in items:
        if isinstance(placed, Place):
            yield module, placed, name
            continue
        for branch in branches_of(module, placed, name)[1]:
            yield from layers_of(branch)


def places_of(items: Iterable[Item]) -> Iterator[tuple[Place, str]]:
    """Every place that a batch is brought to, with the name of the layer or join that is there."""
    for module, placed, name in items:
        if isinstance(placed, Place):
            yield placed, name
            continue
        for branch in branches_of(module, placed, name)[1]:
            yield from places_of(branch)
        yield placed.join, f"the join of {name}"


def branches_of(
    module: nn.Module, placed: PlacedBranches, name: str
) -> tuple[Branched, list[list[Item]]]:
    """``module``, which is branched, and the items of each of its branches."""
    assert isinstance(module, Branched)
    return module, [
        list(items_of(cast(nn.Sequential, branch), plan, f"{name}.branches.{index}."))
        for index, (branch, plan) in enumerate(zip(module.branches, placed.branches, strict=True))
    ]
