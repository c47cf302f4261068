"""A parameter whose gradients are folded into Adam's two moments; these are what travels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from bytesched.errors import PluginError

from ..layout.memory import shaped
from ..layout.slots import Slot
from ..proxies.lazy_grads import has_own_memory, lazy_over

__all__ = ["MomentSlot"]


@dataclass(eq=False, repr=False)
class MomentSlot(Slot):
    """One parameter, and its moments: both halves of what it has in the arena.

    Between two mini-batches they are those of Adam. While one is folded, they are this rank's
    share of what the sum over the ranks will be.
    """

    is_in_place: ClassVar[bool] = True

    #: the mean of gradients, and of their squares, both in the parameter's shape
    mean: torch.Tensor = field(init=False)
    square: torch.Tensor = field(init=False)
    #: gradients that were folded since the last step
    folds: int = field(init=False, default=0)
    #: called with the slot when its moments have moved
    moved: Callable[[MomentSlot], None] = field(init=False)

    def __post_init__(self) -> None:
        self.mean = torch.zeros_like(self.parameter.detach())
        self.square = torch.zeros_like(self.mean)

    @property
    def elements(self) -> int:
        return 2 * self.parameter.numel()

    def lay_out(self, memory: torch.Tensor) -> None:
        half = self.parameter.numel()
        mean, square = shaped(memory[:half], self.parameter), shaped(memory[half:], self.parameter)
        self.mean, self.square = mean.copy_(self.mean), square.copy_(self.square)
        self.view = self.mean
        self.realias()
        self.moved(self)

    def adopt(self, mean: torch.Tensor, square: torch.Tensor) -> None:
        """The moments are these from now on, as a script or a checkpoint has set them."""
        self.mean.copy_(mean)
        self.square.copy_(square)

    def take_gradient(self) -> bool:
        # It is in the arena, or will be when that is laid out.
        return True

    def make_lazy(self, synchronize: Callable[[], None]) -> None:
        """What ``parameter.grad`` is between backward and ``step()``: any read of it is refused."""
        lazy = getattr(self, "lazy", None)
        if lazy is None or has_own_memory(lazy):
            lazy = self.lazy = lazy_over(self.mean[:0].reshape(-1))
            # What reads it from C++ cannot be refused.
            nothing = torch.full((), torch.nan, dtype=self.mean.dtype, device=self.mean.device)
            with torch._C.DisableTorchFunctionSubclass():
                lazy.data = nothing.expand_as(self.mean)
            lazy.storage_id = 0
        self.lazy.synchronize, self.lazy.is_taken = self._refuse, _true

    def _refuse(self) -> None:
        raise PluginError(
            f"the gradient of {self.name!r} has been folded into Adam's moments and released "
            "(accumulate='adama'): clipping by norm, GradScaler and whatever else reads p.grad "
            "need training without it"
        )

    def realias(self) -> None:
        self.alias = nn.Parameter(self.parameter.detach(), self.parameter.requires_grad)

    # -- folding -----------------------------------------------------------------------

    def begin(self, mean_factor: float, square_factor: float) -> None:
        """The first gradient of a mini-batch is about to be folded."""
        self.mean.mul_(mean_factor)
        self.square.mul_(square_factor)

    def fold(self, gradient: torch.Tensor, mean_factor: float, square_factor: float) -> None:
        """Adds ``gradient`` and its square, times these."""
        self.mean.add_(gradient, alpha=mean_factor)
        self.square.addcmul_(gradient, gradient, value=square_factor)
        self.folds += 1


def _true(*_: Any) -> bool:
    return True
