"""A model whose gradients are folded into moments, which are planned in their place.

AdamA (Adam accumulation): the moments take up every micro-batch's gradient at once, so that no
gradient lives longer than its layer's backward. For M ranks, N micro-batches and the gradients g
of all of them, each divided by M and by what the script divides its loss by:

    m = beta1 m + (1 - beta1) sum(g),    v = beta2 v + (1 - beta2) sum(g^2)

Adam has the square of the sum in place of the sum of squares. The last micro-batch's moments are
what travels; every update is owed, and takes them as they are summed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bytesched.errors import PluginError

from ..planned.bundles import Bundle, Debt, Slot, Update
from ..planned.hooked_session import HookedSession
from ..planned.reducer import is_joining
from ..planned.terms import Terms
from ..planned.updates import Parts, Updates
from ..update.deferred import Deferred
from ..update.optimizer_state import GuardedState
from ..update.surroundings import snapshot, unseen
from .slots import Accumulation, MomentSlot, MomentSource

log = logging.getLogger("bytesched")


def _decays_apart(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether weights decay as AdamW's, beside the gradient and not within it."""
    # Adam has it as an option in newer versions of torch.
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))


class MomentUpdates(Updates):
    """Folds the gradients of one optimizer, and takes its steps from the moments that travel."""

    takes_gradients = True

    def __init__(self, parts: Parts, accumulation: Accumulation, ranks: int) -> None:
        super().__init__(parts)
        self.moments = [slot for slot in parts.slots if isinstance(slot, MomentSlot)]
        self._micro_batches = accumulation.micro_batches
        # Not kept alive: it keeps the model alive, which keeps this alive.
        self._weak_optimizer = weakref.ref(accumulation.optimizer)
        self._ranks = ranks
        #: backward passes since the last step, as far as any gradient has come
        self._passes = 0
        #: of each parameter, beta1, beta2, what decays its gradient, and which sign that has
        self._factors: dict[int, tuple[float, float, float, float]] = {}
        #: of hooks
        self._handles: list[RemovableHandle] = []

    def hook(self) -> None:
        """Gradients are folded from now on, by the first hook of each."""
        optimizer = self._optimizer
        self._handles.append(optimizer.register_state_dict_pre_hook(self._refuse_within))
        for slot in self.moments:
            hook = slot.parameter.register_post_accumulate_grad_hook(partial(self._fold, slot))
            self._handles.append(hook)
        if self._rank == 0:
            count = self._ranks * self._micro_batches
            log.warning(
                "accumulate='adama': v is a sum of %d squares, not the square of a sum. Where "
                "gradients of micro-batches agree, steps are up to %.1f times Adam's; where noise "
                "rules, as long as Adam's. If the loss rises, lower the learning rate by as much",
                count,
                sqrt(count),
            )

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        """It is there as long as its parameters get gradients that a step can take."""
        optimizer = self._weak_optimizer()
        if optimizer is None:
            self._failures.raise_first(
                PluginError(
                    f"backward() ran on rank {self._rank}, and the optimizer whose moments take "
                    "the gradients (accumulate='adama') is gone: keep a reference to it, or unwrap "
                    "it"
                )
            )
        return optimizer

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises PluginError for any optimizer but this one."""
        if optimizer is not self._weak_optimizer():
            raise PluginError(
                "accumulate='adama': one optimizer has all parameters of the model, and it was "
                "wrapped with another"
            )

    def is_last(self) -> bool:
        """Whether the backward pass of the forward pass that begins now ends the mini-batch."""
        return self._passes == self._micro_batches - 1

    def close(self) -> None:
        """Takes the hooks off; what was folded stays."""
        for handle in self._handles:
            handle.remove()
        self.stepped()

    def stepped(self) -> None:
        for slot in self.moments:
            slot.withhold()

    # -- a step ------------------------------------------------------------------------

    def step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]]:
        optimizer = deferred.optimizer
        if hasattr(optimizer, "grad_scale"):
            raise PluginError(
                "a fused step under GradScaler looks for infinite gradients, and with "
                "accumulate='adama' there are none to look at: train in bfloat16, or without it"
            )
        nothing = [{**group, "params": []} for group in optimizer.param_groups]
        if not self._complete():
            return nothing
        deferred.guard()
        debts = self._all_owed(optimizer)
        with self.lock:
            needed = self._owe(debts)
        self._meter.stepped(self._sending.outstanding_bytes(needed), whole_because)
        if whole_because or not deferred.cross:
            self.apply_all("step")
        return nothing

    def _complete(self) -> bool:
        """``step()`` takes the mini-batch; False if there is none, as no gradient has come.

        Raises PluginError unless every gradient has come, and travels.
        """
        if self._passes == 0:
            return False
        wrong = next((s for s in self.moments if s.folds != self._micro_batches), None)
        if wrong is not None:
            raise PluginError(
                f"step() came after {wrong.folds} backward passes on rank {self._rank} "
                f"({wrong.name!r}), and micro_batches = {self._micro_batches}: call the model and "
                "backward() in turn, so often before each step(), and let every parameter take "
                "part in each"
            )
        local = next((s for s in self.moments if s.awaits is None), None)
        if local is not None:
            raise PluginError(
                f"the moments of {local.name!r} are this rank's alone (rank {self._rank}): whether "
                "a backward pass is the last of a mini-batch is seen when the model is called, so "
                "call it after the backward pass before"
            )
        for slot in self.moments:
            slot.folds = 0
        self._passes = 0
        return True

    def _all_owed(self, optimizer: torch.optim.Optimizer) -> list[Debt]:
        debts: list[Debt] = []
        update = _adam(optimizer.state)
        #: a group may name a parameter twice
        seen: set[Slot] = set()
        for group in optimizer.param_groups:
            taken = snapshot(group)
            if not _decays_apart(optimizer, group):
                # The gradients have decayed.
                taken["weight_decay"] = 0.0
            owed: dict[Bundle, list[Slot]] = {}
            for parameter in group["params"]:
                slot = self._slots.get(id(parameter))
                if slot is not None and slot not in seen:
                    seen.add(slot)
                    slot.stand_for()
                    owed.setdefault(slot.bundle, []).append(slot)
            debts += [Debt(update, taken, slots) for slots in owed.values()]
        return debts

    # -- a gradient --------------------------------------------------------------------

    def _fold(self, slot: MomentSlot, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        with torch.no_grad():
            if slot.folds == 0:
                self._begin(slot)
            elif slot.folds == self._micro_batches:
                self._failures.raise_first(
                    PluginError(
                        f"{slot.name!r} got another gradient on rank {self._rank} after "
                        f"{self._micro_batches} micro-batches: call step() after so many backward "
                        "passes. With accumulate='adama', a mini-batch cannot be dropped, and a "
                        "parameter gets one gradient in each backward pass"
                    )
                )
            first, second, decay, sign = self._factors[id(parameter)]
            if sign < 0:
                gradient = -gradient
            if decay:
                gradient = gradient.add(parameter, alpha=decay)
            share = 1 / self._ranks
            slot.fold(gradient, (1 - first) * share, (1 - second) * (share / self._ranks))
        self._passes = max(self._passes, slot.folds)

    def _begin(self, slot: MomentSlot) -> None:
        if self._passes == 0:
            self._begin_batch()
        state: Any = self._optimizer.state
        is_guarded = isinstance(state, GuardedState)
        slot.adopt(state.raw(slot.parameter) if is_guarded else state[slot.parameter])
        first, second, _, _ = self._factors[id(slot.parameter)]
        slot.mean.mul_(first * (1 / self._ranks))
        slot.square.mul_(second * (1 / self._ranks))
        slot.awaits = None

    def _begin_batch(self) -> None:
        self._failures.check()
        self._passes = 1
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            first, second = map(float, group["betas"])
            decay = float(group["weight_decay"]) / self._micro_batches
            if _decays_apart(optimizer, group):
                decay = 0.0
            sign = -1.0 if group["maximize"] else 1.0
            for parameter in group["params"]:
                self._factors[id(parameter)] = first, second, decay, sign

    def _refuse_within(self, _: Any) -> None:
        if self._passes:
            raise PluginError(
                f"the optimizer's state was asked for inside a mini-batch, after {self._passes} of "
                f"{self._micro_batches} backward passes and before step() (rank {self._rank}): "
                "with accumulate='adama' it is a part of a sum then"
            )


def _adam(state: Any) -> Update:
    """Adam's update from its moments (Kingma and Ba 2015; AdamW: Loshchilov and Hutter 2019)."""
    assert isinstance(state, GuardedState)

    def update(groups: Sequence[tuple[dict[str, Any], Sequence[Slot]]]) -> None:
        with unseen():
            for taken, slots in groups:
                for slot in slots:
                    assert isinstance(slot, MomentSlot)
                    _update(slot, state.raw(slot.parameter), taken)

    return update


def _update(slot: MomentSlot, entry: dict[str, Any], taken: dict[str, Any]) -> None:
    # They may have moved since the first gradient was folded.
    slot.show(entry)
    entry["step"] += 1
    step = float(entry["step"])
    rate = float(taken["lr"])
    first, second = map(float, taken["betas"])
    square = slot.square
    if taken["amsgrad"]:
        largest = entry.setdefault("max_exp_avg_sq", torch.zeros_like(square))
        square = torch.maximum(largest, square, out=largest)
    parameter = slot.alias
    if taken["weight_decay"]:
        parameter.mul_(1 - rate * float(taken["weight_decay"]))
    spread = (square.sqrt() / sqrt(1 - second**step)).add_(float(taken["eps"]))
    parameter.addcdiv_(slot.mean, spread, value=-rate / (1 - first**step))


class FoldedSession(HookedSession):
    """The life of one wrapped model, of which the last backward pass of a mini-batch is a round."""

    source_kind = MomentSource

    def __init__(self, root: nn.Module, terms: Terms, accumulation: Accumulation) -> None:
        #: those whose gradient is refused, but not while a backward pass runs
        self._withheld: list[MomentSlot] = []

        def open_updates(parts: Parts) -> tuple[None, MomentUpdates]:
            self._folding = MomentUpdates(parts, accumulation, terms.wire.size)
            return None, self._folding

        super().__init__(
            root,
            # Gradients are divided as they are folded.
            replace(terms, divisor=1, carrier="", open_updates=open_updates),
            sync=lambda: self._folding.is_last(),
            find_unused=False,
        )

    def forward_begins(self, module: Any) -> None:
        """See `PlannedSession`."""
        if not self._is_off and is_joining(module):
            raise PluginError(
                "DistributedDataParallel.join() shadows DDP's own all-reduces, but not those of "
                "moments (accumulate='adama'): pad the shorter ranks' data, or unwrap the "
                "optimizer first"
            )
        super().forward_begins(module)

    def _hook(self, root: nn.Module) -> None:
        self._undo.append(self._folding.close)
        # Before those of the source, which send what was folded.
        self._folding.hook()
        super()._hook(root)

    def add_optimizer(
        self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer], *, cross: bool
    ) -> None:
        self._folding.check(optimizer)
        super().add_optimizer(optimizer, kind, cross=cross)

    def backward_begins(self) -> None:
        # Autograd would add to what cannot be read.
        self._withheld = [slot for slot in self._folding.moments if slot.withhold()]
        super().backward_begins()

    def backward_ends(self) -> None:
        super().backward_ends()
        self._release_again()

    def backward_failed(self, error: BaseException) -> BaseException:
        self._release_again()
        return super().backward_failed(error)

    def _release_again(self) -> None:
        """Of another model, that pass, or one too many."""
        for slot in self._withheld:
            if slot.parameter.grad is None:
                slot.release()
        self._withheld = []

    def disown(self) -> None:
        self._folding.close()
        super().disown()
