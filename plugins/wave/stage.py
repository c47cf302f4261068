"""One stage of a model: its weights in one block of memory, which comes and goes; room for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import nn

from bytesched.errors import PluginError

from .routes import WEIGHTS, Cargo, Route


class Stage:
    """A run of layers, whose weights are here at home, on a visit, or not at all.

    The memory of an absent stage is given back, but its storage stays the same object: what
    autograd saved of it in forward is there again when the weights have come back for backward.

    Args:
        index: its place in the model, and the rank that it is at home on.
        module: the layers.
        is_home: whether this rank is that one: then the weights stay.
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
        """The parameters have no gradients any more."""
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
        """Takes a room for ``stage``."""
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
