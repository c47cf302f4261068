"""A model and a plan, item by item."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import nn

from bytesched.burst.cost import Place, PlacedBranches, Plan
from bytesched.errors import PluginError
from bytesched.plugins.burst.branched import Branched

__all__ = ["Item", "end_of", "items_of", "layers_of"]

#: a layer or branches, where it is, and its name
Item = tuple[nn.Module, Place | PlacedBranches, str]


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


def layers_of(items: Iterator[Item]) -> Iterator[tuple[nn.Module, Place, str]]:
    """Every layer with its place, also those in branches."""
    for module, placed, name in items:
        if isinstance(placed, Place):
            yield module, placed, name
            continue
        assert isinstance(module, Branched)
        for index, (branch, plan) in enumerate(zip(module.branches, placed.branches, strict=True)):
            prefix = f"{name}.branches.{index}."
            yield from layers_of(items_of(cast(nn.Sequential, branch), plan, prefix))


def end_of(placed: Place | PlacedBranches) -> Place:
    return placed if isinstance(placed, Place) else placed.join
