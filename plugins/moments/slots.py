"""A parameter whose gradients are folded into Adam's two moments; these are what travels."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

from ..layout.memory import shaped
from ..planned.bundles import Slot
from .released import stand_in

__all__ = ["MomentSlot"]


class MomentSlot(Slot):
    """One parameter, and its moments, which lie in a bucket.

    Between two mini-batches they are those of Adam. While one is folded, they are this rank's
    share of what the sum over the ranks will be. ``awaits`` is None until they are sent.
    """

    __slots__ = ("folds", "mean", "released", "square")

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        super().__init__(name, parameter)
        #: the mean of gradients, and of their squares, both in the parameter's shape
        self.mean = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        self.square = self.mean
        #: gradients that were folded since the last step
        self.folds = 0
        #: what ``parameter.grad`` is between backward and ``step()``
        self.released: torch.Tensor | None = None

    def lay_out(self, memory: torch.Tensor) -> None:
        """The moments move to the two halves of ``memory``; nothing of them is under way."""
        half = self.parameter.numel()
        mean, square = shaped(memory[:half], self.parameter), shaped(memory[half:], self.parameter)
        self.mean, self.square = mean.copy_(self.mean), square.copy_(self.square)
        self.awaits = ()

    def show(self, entry: MutableMapping[str, Any]) -> None:
        """``entry``, of the optimizer's state, has the moments where they lie."""
        entry["exp_avg"], entry["exp_avg_sq"] = self.mean, self.square

    # -- folding -----------------------------------------------------------------------

    def adopt(self, entry: MutableMapping[str, Any]) -> None:
        """The moments are those of ``entry`` from now on; zero, where it has none."""
        if entry.get("exp_avg") is self.mean and entry.get("exp_avg_sq") is self.square:
            return
        # A new optimizer, or one whose state was loaded, or a script has set.
        nothing = torch.zeros((), dtype=self.mean.dtype, device=self.mean.device)
        self.mean.copy_(entry.get("exp_avg", nothing))
        self.square.copy_(entry.get("exp_avg_sq", nothing))
        entry.setdefault("step", torch.zeros((), dtype=torch.float32))
        self.show(entry)

    def begin(self, mean_factor: float, square_factor: float) -> None:
        """The first gradient of a mini-batch is about to be folded."""
        self.mean.mul_(mean_factor)
        self.square.mul_(square_factor)
        self.awaits = None

    def fold(self, gradient: torch.Tensor, mean_factor: float, square_factor: float) -> None:
        """Adds ``gradient`` and its square, times these."""
        self.mean.add_(gradient, alpha=mean_factor)
        self.square.addcmul_(gradient, gradient, value=square_factor)
        self.folds += 1

    # -- what stands for the gradient --------------------------------------------------

    def release(self) -> None:
        """Any read of the gradient is refused from now on."""
        self.released = stand_in(self.name, self.parameter, self.released)
        self.parameter.grad = self.released

    def withhold(self) -> bool:
        """There is no gradient, if it is one whose reads are refused; whether it was."""
        is_released = self.released is not None and self.parameter.grad is self.released
        if is_released:
            self.parameter.grad = None
        return is_released
