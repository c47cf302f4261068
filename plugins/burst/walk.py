"""The forward pass of one rank: all take the same walk, and compute where they have samples."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from bytesched.burst.cost import Place, PlacedBranches, Plan
from bytesched.errors import PluginError

from .moves import Move, Moves, move, samples_at
from .structure import Item, branches_of, items_of, places_of

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
            there = Move.between(source, target, batch, self._rank, name=f"to {name}", index=index)
            back = Move.between(
                target, source, batch, self._rank, name=f"from {name}", index=index + 1
            )
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
