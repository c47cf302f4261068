"""A model with branches and a plan of it, item by item; and the way of a batch through them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from bytesched.burst.cost import Place, PlacedBranches, Plan
from bytesched.burst.planfile import load_named_plan
from bytesched.errors import PluginError

from .moves import Move, Moves, move, samples_at


class Branched(nn.Module):
    """Sequences that read the same tensor; their outputs are joined. An empty one is a shortcut.

    Args:
        join: "sum", or "concat" along the channels.
    """

    def __init__(self, *branches: nn.Sequential, join: str = "sum") -> None:
        super().__init__()
        joins: dict[str, Any] = {"sum": partial(reduce, add), "concat": partial(torch.cat, dim=1)}
        if join not in joins:
            raise ValueError(f"join {join!r}: one of {', '.join(joins)}")
        self.branches = nn.ModuleList(branches)
        self.join: Callable[[list[Tensor]], Tensor] = joins[join]

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


_Shapes = dict[str, tuple[torch.Size, torch.dtype]]


class Walk:
    """The way of a batch through a model by a plan.

    Where a rank has no samples it carries an empty tensor on, so that autograd meets the same
    moves in the same order on every rank.
    """

    def __init__(self, model: nn.Sequential, plan: Plan, rank: int, moves: Moves) -> None:
        self._model = model
        self._plan = plan
        self._rank = rank
        self._moves = moves
        self._anchor = torch.zeros((), requires_grad=True)
        self._ways: dict[tuple[Place, Place, str, int], tuple[Move, Move]] = {}
        #: what each item gives for one sample of the batch at hand
        self._shapes: _Shapes = {}
        #: the same by what a sample of the inputs is
        self._known_shapes: dict[tuple[torch.Size, torch.dtype], _Shapes] = {}

    def run(self, inputs: Tensor) -> Tensor:
        """The outputs of the samples that this rank has at the last layer."""
        batch = len(inputs)
        items = list(items_of(self._model, self._plan, ""))
        # A rank needs the shape of what other ranks' layers give, which changes with the inputs.
        sample = inputs.shape[1:], inputs.dtype
        self._shapes = self._known_shapes.get(sample, {})
        if not self._shapes:
            self._find_shapes(items, inputs)
            self._known_shapes[sample] = self._shapes
        for place, name in places_of(iter(items)):
            if batch % place.width:
                raise PluginError(
                    f"{batch} samples cannot be split over {place.width} ranks: {name}"
                )
        first = cast(Place, items[0][1])
        here = samples_at(first, self._rank, batch)
        mine = inputs[here.start :: here.step] if here else inputs[:0]
        return self._chain(items, mine, first, batch)[0]

    def _chain(
        self, items: Sequence[Item], x: Tensor, before: Place, batch: int
    ) -> tuple[Tensor, Place]:
        """What comes out of some items, and where it is."""
        for module, placed, name in items:
            if isinstance(placed, Place):
                x = self._moved(x, before, placed, batch, name)
                before = placed
                x = module(x) if self._rank in placed.devices else self._absent(x, name)
                continue
            x = self._run_branches(module, placed, name, x, before, batch)
            before = placed.join
        return x, before

    def _run_branches(
        self,
        module: nn.Module,
        placed: PlacedBranches,
        name: str,
        x: Tensor,
        before: Place,
        batch: int,
    ) -> Tensor:
        branched, branches = branches_of(module, placed, name)
        # All ways in before any branch is computed: the ranks of other lanes wait for them.
        entered = []
        for items in branches:
            entry = items[0][1].end if items else before
            where = items[0][2] if items else ""
            entered.append((self._moved(x, before, entry, batch, where), entry))
        left = [
            self._chain(items, y, entry, batch)
            for items, (y, entry) in zip(branches, entered, strict=True)
        ]
        return branched.join(
            [
                self._moved(y, end, placed.join, batch, f"{name}.join{index}")
                for index, (y, end) in enumerate(left)
            ]
        )

    def _moved(self, x: Tensor, source: Place, target: Place, batch: int, name: str) -> Tensor:
        if source == target:
            return x
        key = (source, target, name, batch)
        if key not in self._ways:
            index = 2 * len(self._ways)
            there = Move.between(source, target, batch, self._rank, f"to {name}", index)
            back = Move.between(target, source, batch, self._rank, f"from {name}", index + 1)
            self._ways[key] = there, back
        scale = source.width / target.width
        return move(x, self._anchor, self._moves, *self._ways[key], scale)

    def _absent(self, x: Tensor, name: str) -> Tensor:
        """No samples, as if the layer had computed them: keeps the chain for backward whole."""
        shape, dtype = self._shapes[name]
        return x.reshape(0, *shape).to(dtype)

    def _find_shapes(self, items: Sequence[Item], inputs: Tensor) -> None:
        """What each layer gives for one sample; a rank needs it for layers that it does not run."""

        def walk(items: Sequence[Item], x: Tensor) -> Tensor:
            for module, placed, name in items:
                if isinstance(placed, Place):
                    x = copy.deepcopy(module).to("meta")(x)
                else:
                    branched, branches = branches_of(module, placed, name)
                    x = branched.join([walk(branch, x) for branch in branches])
                self._shapes[name] = x.shape[1:], x.dtype
            return x

        with torch.no_grad():
            walk(items, inputs[:1].to("meta"))
