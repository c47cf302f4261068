"""Parameters, the slices of them that lie in chunks, and what is updated together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from bytesched.round import TAKEN, Gradient
from bytesched.round import Bundle as BundleOf

from ..proxies.lazy_grads import LazyGrad, has_aliases, lazy_over, plain, point
from .memory import is_gradient_shared, is_laid_out_as, lies_over, shaped

__all__ = ["Bundle", "Job", "Slice", "Slot", "Update"]


@dataclass(eq=False, repr=False)
class Slot(Gradient):
    """One parameter, and where its gradient lies."""

    parameter: nn.Parameter
    #: the arena's memory in the parameter's shape and strides
    view: torch.Tensor = field(init=False)
    #: what ``parameter.grad`` is between backward and the next ``zero_grad``
    lazy: LazyGrad = field(init=False)
    #: the same storage and version counter as the parameter, with ``view`` as its gradient:
    #: updates run on it, so that they never touch ``parameter.grad`` or its class
    alias: nn.Parameter = field(init=False)
    bundle: Bundle = field(init=False)
    #: its parts, by chunk
    slices: list[Slice] = field(init=False, default_factory=list)
    #: of its gradient hook
    hook_id: int = field(init=False, default=-1)
    #: what a use of the parameter calls while its update is outstanding
    synchronize: Callable[[], None] = field(init=False)

    def lay_out(self, memory: torch.Tensor) -> None:
        """``memory``, as many elements of the arena, is where its sum comes."""
        self.view = shaped(memory, self.parameter)
        self.realias()

    def take_gradient(self) -> bool:
        """``parameter.grad``, if there is one, is the local gradient of this round.

        False if that cannot be: it is of another dtype or device than in the first round.
        """
        grad = self.parameter.grad
        if grad is None:
            self.give(None)
            return True
        view = self.view
        if grad.dtype is not view.dtype or grad.device != view.device:
            return False
        is_made_here = not grad.requires_grad
        self.is_apart = is_made_here and not is_laid_out_as(grad, view)
        # There is no lazy gradient before the first round is over.
        lazy: LazyGrad | None = getattr(self, "lazy", None)
        if lazy is not None and grad is lazy:
            self.is_apart = self.is_apart or lazy.is_kept or has_aliases(lazy)
            if lies_over(lazy, view):
                # The lazy gradient may get other memory before this is sent.
                self.give(view)
                return True
        elif is_made_here:
            # Of the references to it, this one does not count.
            grad = None
            self.is_apart = is_gradient_shared(self.parameter) or self.is_apart
        assert self.parameter.grad is not None
        local = self.parameter.grad
        if type(local) is LazyGrad:
            local = plain(local)
        if not is_made_here:
            local = local.detach()
        for slice_ in self.slices:
            slice_.grad = local
        return True

    def give(self, local: torch.Tensor | None) -> None:
        """``local`` is what is packed for it, until each of its chunks is complete."""
        for slice_ in self.slices:
            slice_.grad = local

    def make_lazy(self, synchronize: Callable[[], None]) -> None:
        """A new lazy view; the old one, if there is one, is not waited for any more.

        That which is the gradient of the parameter at the moment becomes it again.
        """
        lazy = getattr(self, "lazy", None)
        if lazy is not None and self.parameter.grad is lazy:
            point(self.lazy, self.view)
        else:
            self.lazy = lazy_over(self.view)
        self.lazy.synchronize = synchronize
        self.lazy.is_taken = self.is_taken

    def is_taken(self) -> bool:
        """True while the memory of the gradient is an update's."""
        return self.state in TAKEN and self.bundle.is_outstanding

    def realias(self) -> None:
        """Makes the alias anew, after the parameter got other memory."""
        self.alias = nn.Parameter(self.parameter.detach(), self.parameter.requires_grad)
        self.alias.grad = self.view


@dataclass(eq=False)
class Slice:
    """The part of one slot that lies in one chunk."""

    slot: Slot
    #: elements of the slot, in memory order
    start_at: int
    stop_at: int
    #: the same elements in the arena
    target: torch.Tensor
    #: all elements of the slot
    is_whole: bool
    #: the local gradient of the slot, from its hook until the chunk is complete
    grad: torch.Tensor | None = field(init=False, default=None)


class Update(Protocol):
    """Updates parameters, on their aliases."""

    def update(self, groups: list[tuple[dict[str, Any], list[Slot]]]) -> None:
        """Updates the slots of each group under its hyper-parameters."""


@dataclass(frozen=True, eq=False)
class Job:
    """One update: by what, under the hyper-parameters that held at ``step()``."""

    by: Update
    hyperparameters: dict[str, Any]
    slots: list[Slot] = field(default_factory=list)
    #: alive until the update is applied
    keeps: object = None


#: parameters that are updated together
Bundle: TypeAlias = BundleOf[Slot, Job]
