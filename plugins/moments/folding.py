"""The mini-batch: each gradient is folded as it comes, and the last of them is what travels.

AdamA (Adam accumulation): the moments take up every micro-batch's gradient at once, so that no
gradient lives longer than its layer's backward. For M ranks, N micro-batches and the gradients g
of all of them, each divided by M and by what the script divides its loss by:

    m = beta1 m + (1 - beta1) sum(g),    v = beta2 v + (1 - beta2) sum(g^2)

Adam has the square of the sum in place of the sum of squares.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any, Final, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from bytesched.config import Config
from bytesched.errors import ConfigError, PluginError

from ..failures import Failures
from ..update.optimizer_state import GuardedState
from .slots import MomentSlot

log = logging.getLogger("bytesched")


@dataclass(frozen=True)
class Accumulation:
    """What a script asks for: ``micro_batches`` backward passes before each ``step()``."""

    optimizer: torch.optim.Optimizer
    micro_batches: int


def decays_apart(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether weights decay as AdamW's, beside the gradient and not within it."""
    # Adam has it as an option in newer versions of torch.
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))


class Folding:
    """Folds the gradients of one optimizer, whose moments the slots hold."""

    def __init__(
        self,
        accumulation: Accumulation,
        slots: Sequence[MomentSlot],
        failures: Failures,
        *,
        rank: int,
        ranks: int,
    ) -> None:
        self.micro_batches = accumulation.micro_batches
        # Not kept alive: it keeps the model alive, which keeps this alive.
        self._weak_optimizer = weakref.ref(accumulation.optimizer)
        self._slots = slots
        self._failures = failures
        self._rank, self._ranks = rank, ranks
        self._mean_factor = 1 / ranks
        self._square_factor = self._mean_factor / ranks
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
        for slot in self._slots:
            hook = slot.parameter.register_post_accumulate_grad_hook(partial(self._fold, slot))
            self._handles.append(hook)
        if self._rank == 0:
            count = self._ranks * self.micro_batches
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
            self._fail(
                f"backward() ran on rank {self._rank}, and the optimizer whose moments take the "
                "gradients (accumulate='adama') is gone: keep a reference to it, or unwrap it"
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
        return self._passes == self.micro_batches - 1

    def complete(self) -> bool:
        """``step()`` takes the mini-batch; False if there is none, as no gradient has come.

        Raises PluginError unless every gradient has come, and travels.
        """
        if self._passes == 0:
            return False
        wrong = next((s for s in self._slots if s.folds != self.micro_batches), None)
        if wrong is not None:
            raise PluginError(
                f"step() came after {wrong.folds} backward passes on rank {self._rank} "
                f"({wrong.name!r}), and micro_batches = {self.micro_batches}: call the model and "
                "backward() in turn, so often before each step(), and let every parameter take "
                "part in each"
            )
        local = next((s for s in self._slots if s.awaits is None), None)
        if local is not None:
            raise PluginError(
                f"the moments of {local.name!r} are this rank's alone (rank {self._rank}): whether "
                "a backward pass is the last of a mini-batch is seen when the model is called, so "
                "call it after the backward pass before"
            )
        for slot in self._slots:
            slot.folds = 0
        self._passes = 0
        return True

    def close(self) -> None:
        """Takes the hooks off; what was folded stays."""
        for handle in self._handles:
            handle.remove()
        for slot in self._slots:
            slot.withhold()

    # -- a gradient --------------------------------------------------------------------

    def _fold(self, slot: MomentSlot, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        with torch.no_grad():
            if slot.folds == 0:
                self._begin(slot)
            elif slot.folds == self.micro_batches:
                self._fail(
                    f"{slot.name!r} got another gradient on rank {self._rank} after "
                    f"{self.micro_batches} micro-batches: call step() after so many backward "
                    "passes. With accumulate='adama', a mini-batch cannot be dropped, and a "
                    "parameter gets one gradient in each backward pass"
                )
            first, second, decay, sign = self._factors[id(parameter)]
            if sign < 0:
                gradient = -gradient
            if decay:
                gradient = gradient.add(parameter, alpha=decay)
            slot.fold(gradient, (1 - first) * self._mean_factor, (1 - second) * self._square_factor)
        self._passes = max(self._passes, slot.folds)

    def _begin(self, slot: MomentSlot) -> None:
        if self._passes == 0:
            self._begin_batch()
        state: Any = self._optimizer.state
        is_guarded = isinstance(state, GuardedState)
        slot.adopt(state.raw(slot.parameter) if is_guarded else state[slot.parameter])
        first, second, _, _ = self._factors[id(slot.parameter)]
        slot.mean.mul_(first * self._mean_factor)
        slot.square.mul_(second * self._mean_factor)
        slot.awaits = None

    def _begin_batch(self) -> None:
        self._failures.check()
        self._passes = 1
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            first, second = map(float, group["betas"])
            decay = float(group["weight_decay"]) / self.micro_batches
            if decays_apart(optimizer, group):
                decay = 0.0
            sign = -1.0 if group["maximize"] else 1.0
            for parameter in group["params"]:
                self._factors[id(parameter)] = first, second, decay, sign

    def _refuse_within(self, _: Any) -> None:
        if self._passes:
            raise PluginError(
                f"the optimizer's state was asked for inside a mini-batch, after {self._passes} of "
                f"{self.micro_batches} backward passes and before step() (rank {self._rank}): with "
                "accumulate='adama' it is a part of a sum then"
            )

    def _fail(self, what: str) -> NoReturn:
        error = PluginError(what)
        self._failures.fail(error, is_raised=True)
        raise error


ADAMA: Final = "adama"


def check_request(accumulate: Any, micro_batches: Any) -> None:
    """Raises ConfigError for what is wrong with these two arguments of ``wrap``."""
    if accumulate not in (None, ADAMA):
        raise ConfigError(f"accumulate = {accumulate!r}: {ADAMA!r}, or leave it out")
    if type(micro_batches) is not int or micro_batches < 1:
        raise ConfigError(
            f"micro_batches = {micro_batches!r}: a whole number, at least 1, of backward passes "
            "before each step()"
        )
    if accumulate is None and micro_batches != 1:
        raise ConfigError(
            f"micro_batches = {micro_batches} without accumulate = {ADAMA!r}: ordinary "
            "accumulation needs no_sync() alone"
        )


def folding_statements(
    accumulation: Accumulation,
    slots: Sequence[MomentSlot],
    config: Config,
    *,
    find_unused: bool | None,
    has_groups: bool,
) -> list[str]:
    """What all ranks must agree on. Raises PluginError for what it is not there for."""
    _refuse_settings(accumulation.optimizer, config, find_unused, has_groups)
    _refuse_slots(slots, accumulation.optimizer)
    return [f"accumulate = {ADAMA!r}, micro_batches = {accumulation.micro_batches}"]


def _refuse_settings(
    optimizer: torch.optim.Optimizer, config: Config, find_unused: bool | None, has_groups: bool
) -> None:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise PluginError(
            f"accumulate='adama' folds gradients into the moments of Adam and AdamW, and this is a "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    for name, is_set, why in (
        ("split = 'on'", config.split == "on", "there is no gradient whose norm could be asked"),
        (
            f"compression = {config.compression!r}",
            config.compression != "none",
            "moments are kept from step to step, and would lose what is rounded away",
        ),
        (
            "find_unused_parameters = True",
            bool(find_unused),
            "moments of a parameter that no rank uses would change",
        ),
        ("groups", has_groups, "moments are summed over all ranks"),
        (
            "differentiable = True",
            any(group["differentiable"] for group in optimizer.param_groups),
            "a step has no graph",
        ),
    ):
        if is_set:
            raise PluginError(f"accumulate='adama' and {name}: {why}; leave one of them out")


def _refuse_slots(slots: Sequence[MomentSlot], optimizer: torch.optim.Optimizer) -> None:
    managed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for slot in slots:
        if id(slot.parameter) not in managed:
            raise PluginError(
                f"accumulate='adama': parameter {slot.name!r} requires a gradient, and is not in "
                "the optimizer"
            )
        if slot.parameter.is_complex():
            raise PluginError(f"accumulate='adama': parameter {slot.name!r} is complex")
