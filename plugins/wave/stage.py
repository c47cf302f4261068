"""Stages of a model, their memory and their ways: the same on all ranks.

Rank ``k`` is the home of stage ``k``. The stages come to every rank in the order of the
model, then in the opposite one; between the two the last one stays where it is. They come to rank
0 from their home, and to every other rank from the one before it, unless it is their home.
Gradients are passed from rank to rank, each of which adds its own, and by the last one home.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import torch
from torch import nn

from bytesched.errors import PluginError


class Cargo(Enum):
    """What is on its way."""

    #: weights for the forward pass
    FORWARD = 0
    #: weights for the backward pass
    BACKWARD = 1
    #: the sum of the gradients so far
    GRADIENT = 2
    #: that of all ranks, on its way home
    HOME = 3

    def of(self, index: int) -> str:
        """A stage's, for people."""
        return f"{self.name.lower()} {index}"

    def tag(self, index: int, number: int) -> int:
        """Of a message between two ranks: chunk ``number`` of a stage's."""
        return (index * len(Cargo) + self.value) * _TAGS_PER_CARGO + number + 1


WEIGHTS: Final = frozenset({Cargo.FORWARD, Cargo.BACKWARD})
_TAGS_PER_CARGO: Final = 1 << 20


class Route(NamedTuple):
    """One stage's cargo to one rank."""

    cargo: Cargo
    stage: int
    to: int


def visits(ranks: int) -> list[tuple[Cargo, int]]:
    """The stages in the order in which a rank computes with them."""
    forward = [(Cargo.FORWARD, k) for k in range(ranks)]
    return forward + [(Cargo.BACKWARD, k) for k in reversed(range(ranks))]


def source(rank: int, cargo: Cargo, stage: int, ranks: int) -> int | None:
    """The rank that the weights come from; None if they are there already."""
    if rank == stage or (cargo is Cargo.BACKWARD and stage == ranks - 1):
        return None
    return rank - 1 if rank else stage


def sends(rank: int, ranks: int) -> list[Route]:
    """Everything that ``rank`` sends in a step, most urgent first."""
    found = []
    for cargo, k in visits(ranks):
        found += [
            Route(cargo, k, to)
            for to in dict.fromkeys((0, rank + 1))
            if to < ranks and source(to, cargo, k, ranks) == rank
        ]
        if cargo is Cargo.BACKWARD:
            if rank < ranks - 1:
                found.append(Route(Cargo.GRADIENT, k, rank + 1))
            elif k != rank:
                found.append(Route(Cargo.HOME, k, k))
    return found


class Stage:
    """A run of layers, whose weights are here at home, on a visit, or not at all.

    The memory of an absent stage is given back, but its storage stays the same object: what
    autograd saved of it in forward is there again when the weights have come back for backward.
    """

    def __init__(self, index: int, module: nn.Sequential, *, is_home: bool) -> None:
        self.index = index
        self.module = module
        self.is_home = is_home
        self.parameters = list(module.parameters())
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            raise PluginError(f"stage {index} has parameters of several kinds: {kinds}")
        if not kinds:
            raise PluginError(f"stage {index} has no parameters: use fewer ranks")
        (dtype, device), sizes = kinds.pop(), [p.numel() for p in self.parameters]
        #: all weights, one after another; behind them, in gradients, a mark for each that there is
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=device)
        self._bounds = list(pairwise([0, *accumulate(sizes)]))
        self._views = self._shaped(self.flat)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        #: of the weights; and of all that is sent
        self.weight_bytes = sum(sizes) * self.flat.itemsize
        self.nbytes = self.flat.nbytes
        self._absent = torch.empty(0, dtype=dtype, device=device)
        self.present = True
        if not is_home:
            self.leave()

    def come(self) -> None:
        """Makes room for the weights, which are then to be written to ``flat``."""
        self.flat.untyped_storage().resize_(self.nbytes)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view
        self.present = True

    def leave(self) -> None:
        """Gives the memory back: the parameters are empty until the weights come again."""
        for parameter in self.parameters:
            parameter.data = self._absent
        self.flat.untyped_storage().resize_(0)
        self.present = False

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def take_gradients(self) -> torch.Tensor:
        """The gradients that backward has left, in one tensor that can be added to others'."""
        flat = torch.zeros_like(self.flat)
        marks = self._marks(flat)
        for index, view in enumerate(self._shaped(flat)):
            parameter = self.parameters[index]
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                marks[index] = 1
                parameter.grad = None
        return flat

    def set_gradients(self, flat: torch.Tensor) -> None:
        """Makes ``flat``, a sum, the gradients of the parameters that had one somewhere."""
        marked = self._marks(flat).tolist()
        for parameter, view, mark in zip(self.parameters, self._shaped(flat), marked, strict=True):
            # None and zeros are two things to an optimizer with momentum or weight decay.
            parameter.grad = view if mark else None

    def _marks(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[-len(self.parameters) :]

    def _shaped(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[start:stop].view(parameter.shape)
            for parameter, (start, stop) in zip(self.parameters, self._bounds, strict=True)
        ]


#: stages on a visit: one that is computed with, and the next
ROOMS: Final = 2
#: gradients that may wait: of this rank, for the sum of those before it, and sums, to be sent
WAITING: Final = 2


class Rooms:
    """Room for visitors, and a count of bytes. Callers hold one lock."""

    def __init__(self, stages: Sequence[Stage], rank: int) -> None:
        self._stages = stages
        self._home = stages[rank]
        self._free = ROOMS
        #: visits of this step that this rank has computed with
        self._used: set[tuple[Cargo, int]] = set()
        self._live_bytes = 0
        #: the most bytes of weights and gradients that were here, the stage at home included
        self.peak_bytes = 0
        self.count(self._home.nbytes)

    @property
    def bound_bytes(self) -> int:
        """What ``peak_bytes`` cannot exceed, however fast or slow the other ranks are."""
        largest_bytes = max(stage.nbytes for stage in self._stages)
        # At home weights and gradients; else visitors, gradients that wait, and one that arrives.
        return 2 * self._home.nbytes + (ROOMS + 2 * WAITING + 1) * largest_bytes

    def begin(self, *, train: bool) -> None:
        """A step begins; if it trains, with memory for the sum of all ranks' gradients."""
        self._used.clear()
        if train:
            self.count(self._home.nbytes)

    def end(self) -> None:
        """The step has ended: only the stage at home is left."""
        self.count(self._home.nbytes - self._live_bytes)

    def has_room(self, stage: Stage) -> bool:
        """Whether ``stage`` may come; false while it is still here from the forward pass."""
        return self._free > 0 and not stage.present

    def come(self, stage: Stage) -> None:
        self._free -= 1
        self.count(stage.nbytes)
        stage.come()

    def used(self, cargo: Cargo, index: int, left: Mapping[Route, int]) -> None:
        """This rank has computed with the weights of a stage; see `release` for ``left``."""
        self._used.add((cargo, index))
        self.release(cargo, index, left)

    def release(self, cargo: Cargo, index: int, left: Mapping[Route, int]) -> None:
        """A visitor leaves when it was used here and has been passed on.

        Args:
            left: how many chunks of this step are still to be sent, by route.
        """
        stage = self._stages[index]
        cargoes = {cargo}
        if stage is self._stages[-1] and any(route.cargo is Cargo.GRADIENT for route in left):
            # It stays from forward to backward.
            cargo, cargoes = Cargo.BACKWARD, set(WEIGHTS)
        if stage.is_home or (cargo, index) not in self._used:
            return
        if any(n and route.stage == index and route.cargo in cargoes for route, n in left.items()):
            return
        stage.leave()
        self._free += 1
        self.count(-stage.nbytes)

    def count(self, nbytes: int) -> None:
        """So many bytes more are held, or fewer if negative."""
        self._live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
