"""A parameter whose gradients are folded into Adam's two moments; these are what travels."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any
from weakref import ref

import torch
from torch import nn

from bytesched.errors import PluginError

from ..layout import shaped
from ..planned.bundles import Slot
from ..proxies.pending_grads import PendingGrad, make_plain


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


def stand_in(name: str, parameter: nn.Parameter, known: torch.Tensor | None) -> torch.Tensor:
    """A gradient without memory, any read of which raises `PluginError`; ``known``, if it is."""
    if type(known) is PendingGrad:
        return known
    # What reads it from C++ cannot be refused.
    nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
    made: Any = nothing.expand(parameter.shape)
    made.__class__ = PendingGrad
    made.sum_ = _Released(name, made)
    gradient: torch.Tensor = made
    return gradient


class _Released:
    """What such a gradient waits for, in vain; see `Sum`."""

    #: no question about it can be answered without it
    taken = True

    def __init__(self, name: str, gradient: PendingGrad) -> None:
        self._name = name
        self._gradient = ref(gradient)

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """See `Sum`."""
        return NotImplemented

    def settle(self) -> None:
        """See `Sum`."""
        raise PluginError(
            f"the gradient of {self._name!r} has been folded into Adam's moments and released "
            "(accumulate='adama'): clipping by norm, GradScaler and whatever else reads p.grad "
            "need training without it"
        )

    def zeroes(self) -> bool:
        """See `Sum`: it gets memory of its own."""
        gradient = self._gradient()
        if gradient is not None:
            make_plain(gradient)
            gradient.data = torch.empty(
                gradient.shape, dtype=gradient.dtype, device=gradient.device
            )
        return True
