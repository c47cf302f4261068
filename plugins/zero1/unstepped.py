"""Gradients that no step has taken, and that backward will add to."""

from __future__ import annotations

import torch

from bytesched.round import OUTSTANDING, UNTAKEN, Memory

from ..dependency.progress import Progress
from ..layout.plan import Plan
from ..layout.slots import Slice, change
from ..routes.split.turns import Sent
from .full_gradients import FullGradients
from .lockstep import Lockstep
from .spreading import Spreading

__all__ = ["UnsteppedGradients"]


class UnsteppedGradients:
    """Owners send them to all ranks, before a forward pass on each.

    Then every rank has what it would have after an all-reduce: what its script has read or changed
    stays as it is, the rest is what was summed, with the changes that its script has asked for.
    No rank asks for them, as another one may have gone on to where they are added to.
    """

    def __init__(
        self,
        plan: Plan,
        progress: Progress,
        spreading: Spreading,
        full_gradients: FullGradients,
        lockstep: Lockstep,
    ) -> None:
        self._plan = plan
        self._progress = progress
        self._spreading = spreading
        self._full_gradients = full_gradients
        self._lockstep = lockstep

    @torch.no_grad()
    def bring(self) -> None:
        """Those that backward will add to are whole; collective."""
        positions = [
            position
            for position, slot in enumerate(self._plan.slots)
            if slot.state in UNTAKEN
            and slot.memory is not Memory.SPOILED
            and slot.parameter.grad is slot.lazy
        ]
        if self._full_gradients.are_all_here or not positions:
            return
        self._lockstep.sends(positions)
        slots = [self._plan.slots[position] for position in positions]
        # What is sent here is received when another rank's forward pass begins, which may wait for
        # parameters: those go first.
        self._progress.wait(
            lambda: not any(bundle.state in OUTSTANDING for bundle in self._plan.bundles),
            "updates of a step",
        )
        ownerships = self._spreading.ownerships
        foreign = [slot for slot in slots if ownerships.foreign[slot]]
        owned = [slot for slot in slots if slot in ownerships.own]
        self._full_gradients.keep(owned)
        read = {
            slice_.slot: slice_.slot.view.clone()
            for chunk in self._spreading.foreign_chunks(foreign)
            for slice_ in self._plan.slices[chunk.index]
            if slice_.slot.memory is Memory.WHOLE
        }
        with self._progress.lock:
            expected = self._spreading.arm(owned, foreign)
        for chunk in self._spreading.owned_chunks(owned):
            self._spreading.send_gradients(chunk, self._as_summed)
        self._spreading.expect(expected, Sent.GRADIENTS)
        under_way = self._progress.round.under_way
        self._progress.wait(
            lambda: not under_way.comes(expected), "gradients that no step() has used"
        )
        for slot, view in read.items():
            slot.view.copy_(view)
        change(slots)
        self._full_gradients.came(slots)

    def _as_summed(self, slice_: Slice) -> torch.Tensor:
        return self._full_gradients.summed(slice_.slot, slice_.start_at, slice_.stop_at)

    def __repr__(self) -> str:
        return f"<UnsteppedGradients of {self._plan!r}>"
