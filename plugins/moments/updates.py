"""``step()`` where moments travel: every update is armed, and takes moments as they are summed."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch

from bytesched.errors import PluginError

from ..dependency.context import Context
from ..dependency.synchronizing import Synchronizing
from ..layout.slots import Bundle, Job, Slot
from ..update.deferred import Deferred
from ..update.frozen import snapshot
from ..update.optimizer_state import GuardedState
from ..update.pending_updates import PendingUpdates
from ..update.updater import Updater
from .folding import Folding, decays_apart
from .slots import MomentSlot

__all__ = ["AdamUpdate", "MomentUpdates"]


class MomentUpdates(PendingUpdates):
    """The steps of the optimizer whose moments travel."""

    def __init__(
        self,
        slots: list[Slot],
        synchronizing: Synchronizing,
        updater: Updater,
        context: Context,
        folding: Folding,
    ) -> None:
        super().__init__(slots, synchronizing, updater, context)
        self._folding = folding

    def step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]] | None:
        optimizer = deferred.optimizer
        if hasattr(optimizer, "grad_scale"):
            raise PluginError(
                "a fused step under GradScaler looks for infinite gradients, and with "
                "accumulate='adama' there are none to look at: train in bfloat16, or without it"
            )
        nothing = [{**group, "params": []} for group in optimizer.param_groups]
        if not self._folding.complete():
            return nothing
        deferred.guard()
        update = AdamUpdate(optimizer.state)
        armed: dict[Bundle, list[Job]] = {}
        #: a group may name a parameter twice
        seen: set[Slot] = set()
        for group in optimizer.param_groups:
            taken = snapshot(group)
            if not decays_apart(optimizer, group):
                taken["weight_decay"] = 0.0
            for parameter in group["params"]:
                slot = self._slots.get(id(parameter))
                if slot is None or slot in seen:
                    continue
                seen.add(slot)
                if slot.alias.data_ptr() != parameter.data_ptr():
                    slot.realias()
                jobs = armed.setdefault(slot.bundle, [])
                if not jobs or jobs[-1].hyperparameters is not taken:
                    jobs.append(Job(update, taken, keeps=optimizer))
                jobs[-1].slots.append(slot)
        self._arm(armed)
        if whole_because or not deferred.cross:
            self._synchronizing.synchronize_all()
        return nothing

    def stepped(self) -> None:
        for slot in self._slots.values():
            if slot.parameter.grad is slot.lazy:
                slot.parameter.grad = None


class AdamUpdate:
    """Adam's update from its moments (Kingma and Ba 2015; AdamW: Loshchilov and Hutter 2019)."""

    def __init__(self, state: Any) -> None:
        assert isinstance(state, GuardedState)
        self._state = state

    def update(self, groups: list[tuple[dict[str, Any], list[Slot]]]) -> None:
        """See `layout.slots.Update`."""
        with torch.no_grad():
            for taken, slots in groups:
                for slot in slots:
                    assert isinstance(slot, MomentSlot)
                    _update(slot, self._state.raw(slot.parameter), taken)


def _update(slot: MomentSlot, entry: dict[str, Any], taken: dict[str, Any]) -> None:
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
