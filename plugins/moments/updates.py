"""``step()`` where moments travel: every update is owed, and takes moments as they are summed."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch

from bytesched.errors import PluginError

from ..planned.bundles import Bundle, Debt, Slot, Update
from ..planned.updates import Updates
from ..update.deferred import Deferred
from ..update.optimizer_state import GuardedState
from ..update.surroundings import snapshot, unseen
from .folding import Folding, decays_apart
from .slots import MomentSlot


class MomentUpdates(Updates):
    """The steps of the optimizer whose moments travel."""

    takes_gradients = True

    def __init__(self, slots: Sequence[Slot], folding: Folding, *others: Any, **named: Any) -> None:
        super().__init__(slots, *others, **named)
        self._folding = folding

    def step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]]:
        """See `Steps.step`."""
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
        debts = self._all_owed(optimizer)
        with self.lock:
            needed = self._owe(debts)
        self._meter.stepped(self._sending.outstanding_bytes(needed), whole_because)
        if whole_because or not deferred.cross:
            self.apply_all("step")
        return nothing

    def _all_owed(self, optimizer: torch.optim.Optimizer) -> list[Debt]:
        debts: list[Debt] = []
        update = _adam(optimizer.state)
        #: a group may name a parameter twice
        seen: set[Slot] = set()
        for group in optimizer.param_groups:
            taken = snapshot(group)
            if not decays_apart(optimizer, group):
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

    def stepped(self) -> None:
        """See `Steps.stepped`."""
        for slot in self._slots.values():
            assert isinstance(slot, MomentSlot)
            slot.withhold()


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
