"""What a step does while gradients are on the wire: it arms their updates, and does the rest."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import torch

from bytesched.round import UNTAKEN

from ..dependency.context import Context
from ..dependency.synchronizing import Synchronizing
from ..layout.memory import lies_over
from ..layout.slots import Bundle, Job, Slot
from ..proxies.lazy_grads import free, plain
from ..proxies.pending import hold_all
from .deferred import Deferred
from .frozen import snapshot, tensors_of
from .stepping import why_now
from .updater import Updater

__all__ = ["PendingUpdates", "is_of_arena"]


class PendingUpdates:
    """The steps of all optimizers of one model."""

    def __init__(
        self, slots: list[Slot], synchronizing: Synchronizing, updater: Updater, context: Context
    ) -> None:
        self._slots = {id(slot.parameter): slot for slot in slots}
        self._synchronizing = synchronizing
        self._updater = updater
        self._progress = context.progress
        self._round = context.progress.round
        self._streams = context.streams
        self._meter = context.meter
        #: slots whose gradient is a plain tensor for the length of one whole step
        self._stepped_plain: list[tuple[Slot, torch.Tensor]] = []

    def introduce(self, deferred: Deferred) -> None:
        """``deferred`` is one of the optimizers from now on."""
        for slot in self._slots.values():
            deferred.know(slot)

    def step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]] | None:
        """``step()`` updates now: the groups of what cannot wait, or None if that is everything.

        Args:
            whole_because: why nothing of it can wait; empty if some can.
        """
        optimizer = deferred.optimizer
        whole_because = whole_because or why_now(optimizer)
        is_whole = not self._round.unsummed or not deferred.cross or bool(whole_because)
        if not is_whole:
            whole_because = deferred.why_kept() or self._why_read_elsewhere()
        if is_whole or whole_because:
            self._synchronize(optimizer)
            self._meter.stepped(0, whole_because)
            return None
        deferred.guard()
        eager, armed = self._sort(deferred)
        self._arm(armed)
        return eager

    def _why_read_elsewhere(self) -> str:
        """Whose memory others have, who would read it before it is updated; empty if nobody has."""
        with torch._C.DisableTorchFunctionSubclass():
            storages = [
                (slot, tensor.untyped_storage())
                for slot in self._slots.values()
                for tensor in (slot.parameter, slot.alias)
            ]
        ours = Counter(storage._cdata for _, storage in storages)
        for slot, storage in storages:
            # Each of ours, and the storage as an object.
            is_alone = torch._C._storage_Use_Count(storage._cdata) <= ours[storage._cdata] + 1
            if not is_alone or (slot.parameter.device.type == "cpu" and storage.is_shared()):
                return f"the memory of {slot.name!r} is used elsewhere, too"
        return ""

    def stepped(self) -> None:
        """The step is over: gradients are lazy again."""
        for slot, grad in self._stepped_plain:
            if slot.parameter.grad is grad:
                slot.parameter.grad = slot.lazy
        self._stepped_plain.clear()

    def _sort(self, deferred: Deferred) -> tuple[list[dict[str, Any]], dict[Bundle, list[Job]]]:
        """The groups, with what must be stepped right now, and by bundle what can be armed."""
        eager: list[dict[str, Any]] = []
        armed: dict[Bundle, list[Job]] = {}
        #: a group may name a parameter twice
        seen: set[Slot] = set()
        update = deferred.now()
        for group in deferred.optimizer.param_groups:
            taken: dict[str, Any] | None = None
            now = []
            for parameter in group["params"]:
                slot = self._slots.get(id(parameter))
                if (
                    slot is not None
                    and slot.state in UNTAKEN
                    and slot not in seen
                    and is_of_arena(slot)
                ):
                    if taken is None:
                        taken = snapshot(group)
                        self._streams.lend(tensors_of(taken))
                    if slot.alias.data_ptr() != parameter.data_ptr():
                        slot.realias()
                        deferred.know(slot)
                    seen.add(slot)
                    jobs = armed.setdefault(slot.bundle, [])
                    if not jobs or jobs[-1].hyperparameters is not taken:
                        jobs.append(Job(update, taken, keeps=deferred.optimizer))
                    jobs[-1].slots.append(slot)
                elif parameter.grad is not None:
                    if slot is not None:
                        self._synchronizing.synchronize(slot.bundle, slot.name)
                    now.append(parameter)
            eager.append({**group, "params": now})
        return eager, armed

    def _arm(self, armed: dict[Bundle, list[Job]]) -> None:
        self._streams.stepped()
        # Before any update can be applied: a parameter is free only after it was held.
        for job in chain.from_iterable(armed.values()):
            for slot in job.slots:
                # As the update would: a graph that has saved the old value raises.
                torch.autograd.graph.increment_version(slot.parameter)
            hold_all([(slot.parameter, slot.synchronize) for slot in job.slots])
        with self._progress.lock:
            ready, crossing_bytes = self._round.arm(armed)
            self._updater.push(ready)
        self._meter.stepped(crossing_bytes)

    def _synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """Everything of ``optimizer`` is there; what others update may still be outstanding."""
        slots = [
            self._slots[id(parameter)]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in self._slots
        ]
        self._synchronizing.wait_slots(slots)
        with self._progress.lock:
            self._round.step(slots)
        for slot in slots:
            self._make_plain(slot)

    def _make_plain(self, slot: Slot) -> None:
        """Its gradient is a plain tensor until the step is over: torch's fast paths want those."""
        if slot.parameter.grad is slot.lazy:
            grad = slot.view if is_of_arena(slot) else plain(slot.lazy)
            slot.parameter.grad = grad
            self._stepped_plain.append((slot, grad))


def is_of_arena(slot: Slot) -> bool:
    """True if the gradient that the script sees is what was reduced, and not its own."""
    if slot.parameter.grad is not slot.lazy:
        return False
    if lies_over(slot.lazy, slot.view):
        return True
    # It was given other memory, or another shape. No read need have shown that: ``set_``.
    free(slot.lazy)
    return False
