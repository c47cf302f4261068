"""Parameters, the slices of them that lie in chunks, and what is updated together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from bytesched.plugins.layout.memory import is_gradient_shared, is_laid_out_as, lies_over
from bytesched.plugins.proxies.pending import (
    Desk,
    LazyGrad,
    has_aliases,
    lazy_over,
    plain,
    point,
)
from bytesched.task import CommTask

__all__ = ["Bundle", "Job", "Slice", "Slot", "Update"]


@dataclass(eq=False)
class Slot:
    """One parameter, and where its gradient lies."""

    name: str
    parameter: nn.Parameter
    #: the arena's memory in the parameter's shape and strides
    view: torch.Tensor = field(init=False)
    #: what ``parameter.grad`` is between backward and the next ``zero_grad``
    lazy: LazyGrad = field(init=False)
    #: the same storage and version counter as the parameter, with ``view`` as its gradient:
    #: updates run on it, so that they never touch ``parameter.grad`` or its class
    alias: nn.Parameter = field(init=False)
    bundle: Bundle = field(init=False)
    chunks: list[CommTask] = field(default_factory=list)
    #: the local gradient, from its hook until it is packed
    grad: torch.Tensor | None = None
    #: the script sees that gradient in memory of its own: what is reduced is to be found there
    apart: bool = False
    #: its chunks that are not reduced yet in this round
    sending: int = 0
    #: how often its hook fired in this round
    fired: int = 0
    #: how often it must fire (static graphs may use a parameter several times)
    expected: int = 1
    #: of its gradient hook
    hook_id: int = -1
    #: takes part in the update of this round
    used: bool = False
    #: got a gradient that was not reduced (no_sync) since the last round
    used_alone: bool = False
    #: ``step()`` has armed its update
    taken: bool = False
    #: a step has other ranks send parameters into the memory of the gradient
    gone: bool = False
    #: a step has taken it, and this rank alone has it, as its owner
    alone: bool = False
    #: backward has added to what is gone on some rank: on none is this round's sum a gradient
    spoiled: bool = False
    #: was held when the round began, and nothing has read it since ``step()``
    unguarded: bool = False
    #: since it was handed out, the gradient was read whole: there may be other tensors over its
    #: memory, and it may have other memory itself
    is_read: bool = False
    #: in this round it has no gradient yet: what is there is that of the last one, and on no wire
    is_awaited: bool = False
    #: see `LazyGrad.desk`
    desk: Desk | None = None
    #: what the script has done to the elements of the gradient while it was outstanding
    changes: list[Callable[[list[torch.Tensor]], None]] = field(default_factory=list)
    #: what looks at the gradient once it is here, after so many of the changes
    looks: list[tuple[int, Callable[[torch.Tensor], None]]] = field(default_factory=list)
    #: what a use of the parameter calls while its update is outstanding
    synchronize: Callable[[], None] = field(init=False)

    def take_gradient(self) -> bool:
        """``parameter.grad``, if there is one, is the local gradient of this round.

        False if that cannot be: it is of another dtype or device than in the first round.
        """
        self.grad = None
        grad = self.parameter.grad
        if grad is None:
            return True
        if grad.dtype is not self.view.dtype or grad.device != self.view.device:
            return False
        is_made_here = not grad.requires_grad
        self.apart = is_made_here and not is_laid_out_as(grad, self.view)
        # There is no lazy gradient before the first round is over.
        lazy: LazyGrad | None = getattr(self, "lazy", None)
        if lazy is not None and grad is lazy:
            self.apart = self.apart or lazy.is_kept or has_aliases(lazy)
            if lies_over(lazy, self.view):
                # The lazy gradient may get other memory before this is sent.
                self.grad = self.view
                return True
        elif is_made_here:
            # Of the references to it, this one does not count.
            grad = None
            self.apart = is_gradient_shared(self.parameter) or self.apart
        assert self.parameter.grad is not None
        self.grad = plain(self.parameter.grad)
        if not is_made_here:
            self.grad = self.grad.detach()
        return True

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
        self.use_desk(self.desk)

    def use_desk(self, desk: Desk | None) -> None:
        """``desk`` answers for the gradient while it is outstanding."""
        self.desk = desk
        self.lazy.desk, self.lazy.owner = desk, self

    def changed(self) -> torch.Tensor:
        """The gradient after all changes that were noted; its sum must be in the arena."""
        if not self.changes:
            return self.view
        copy = self.view.clone()
        for change in self.changes:
            change([copy])
        return copy

    def change(self) -> None:
        """Makes the changes that were noted, once; nothing of it may be outstanding."""
        if self.is_noted:
            changes, self.changes = self.changes, []
            looks, self.looks = self.looks, []
            with torch.no_grad():
                for number in range(len(changes) + 1):
                    for after, look in looks:
                        if after == number:
                            look(self.view)
                    for change in changes[number : number + 1]:
                        change([self.view])

    @property
    def is_noted(self) -> bool:
        """Whether something is to be done with the gradient when it is here."""
        return bool(self.changes or self.looks)

    def look(self, look: Callable[[torch.Tensor], None]) -> None:
        """``look`` is called with the gradient as it is now, once it is here."""
        self.looks.append((len(self.changes), look))

    def is_taken(self) -> bool:
        """True while the memory of the gradient is an update's, or has become a parameter's.

        And where that is so on other ranks: one that is zeroed has other memory on all of them.
        """
        return self.gone or self.alone or (self.taken and self.bundle.armed)

    def realias(self) -> None:
        """Makes the alias anew, after the parameter got other memory."""
        self.alias = nn.Parameter(self.parameter.detach(), self.parameter.requires_grad)
        self.alias.grad = self.view


@dataclass(eq=False)
class Bundle:
    """Parameters whose gradients are complete at the same moment; they are updated together."""

    index: int
    slots: list[Slot]
    chunks: set[CommTask]
    #: of its gradients
    nbytes: int
    #: chunks still to be reduced in this round
    sending: int = 0
    #: chunks of parameters that their owners have still to send
    coming: int = 0
    #: ``step()`` was called and the update is outstanding
    armed: bool = False
    #: its parameters are pending tensors; ends with the first use after the update
    held: bool = False
    #: the update, while it is armed: what needs gradients, and what needs parameters of owners
    jobs: list[Job] = field(default_factory=list)
    arrivals: list[Job] = field(default_factory=list)

    def take(self) -> list[Job]:
        """The jobs that can be done now, which are the caller's; under the lock of progress."""
        ready: list[Job] = []
        if not self.sending:
            ready, self.jobs = self.jobs, []
        if not self.coming:
            ready, self.arrivals = [*ready, *self.arrivals], []
        return ready

    @property
    def has_jobs(self) -> bool:
        """Whether anything is still to be done."""
        return bool(self.jobs or self.arrivals)


@dataclass(frozen=True, eq=False)
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
