"""Synchronizing: waiting for exactly what is needed, a gradient or an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from bytesched.plugins.layout.memory import lies_over
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.layout.slots import Bundle, Slot
from bytesched.plugins.proxies.compiling import waiting
from bytesched.plugins.proxies.pending import free, is_held, plain, release
from bytesched.plugins.proxies.spans import span
from bytesched.plugins.session.meter import Meter
from bytesched.plugins.session.progress import Progress
from bytesched.plugins.session.streams import Streams

__all__ = ["Synchronizing"]


class Synchronizing:
    """What the gates of one model call, in the thread of forward, backward or step."""

    def __init__(self, plan: Plan, progress: Progress, streams: Streams, meter: Meter) -> None:
        self._plan = plan
        self._progress = progress
        self._streams = streams
        self._meter = meter
        #: called with the bundles that the forward pass has come to, while iterations are recorded
        self.passed: Callable[[Sequence[Bundle]], None] | None = None
        #: called before a wait for what other ranks' steps send
        self.waits_for_ranks: Callable[[], None] = lambda: None
        #: makes what has arrived of a gradient all of it, where ranks own gradients
        self.complete: Callable[[Slot], None] | None = None
        #: whether that was done
        self.is_whole: Callable[[Slot], bool] = lambda _: True
        for slot in plan.slots:
            self.make_lazy(slot)
        self.plan_cut()

    def plan_cut(self) -> None:
        """The plan has other bundles now."""
        for slot in self._plan.slots:
            slot.synchronize = partial(self.synchronize, slot.bundle, slot.name)

    def make_lazy(self, slot: Slot) -> None:
        """A new lazy gradient; the old one, if there is one, is not waited for any more."""
        slot.make_lazy(partial(self._synchronize_grad, slot))

    def synchronize(self, bundle: Bundle, by: str) -> None:
        """Returns when the update of ``bundle`` has been applied; its parameters are free."""
        self._progress.refuse_in_update(by)
        self._wait_applied(bundle, by)
        if bundle.held:
            self._streams.read()
            bundle.held = False
            for slot in bundle.slots:
                slot.unguarded = False
                if slot.changes or slot.looks:
                    self._change_one(slot)
                # A parameter that was not read in this round may be held since an earlier one.
                if is_held(slot.parameter):
                    release(slot.parameter)

    def _wait_applied(self, bundle: Bundle, by: str) -> None:
        if not bundle.armed:
            return
        if bundle.coming:
            self.waits_for_ranks()
        began = self._meter.moment()
        with waiting(), span("bytesched::wait"):
            self._progress.wait(lambda: not bundle.armed, f"the update of {bundle.slots[0].name!r}")
        self._meter.waited(by, began, bundle)

    def gate(self, bundles: Sequence[Bundle], name: str, module: nn.Module) -> None:
        """In front of every call of ``module``: on the critical path of the forward pass."""
        for bundle in bundles:
            if bundle.held:
                self.synchronize(bundle, name)
        if self.passed is not None:
            self.passed(bundles)
        if not (torch.is_grad_enabled() or module.training):
            # Evaluation may take fast paths that look at the types of all parameters at once.
            self.synchronize_all()

    def synchronize_all(self) -> None:
        """Applies every armed update."""
        for bundle in self._plan.bundles:
            if bundle.held:
                self.synchronize(bundle, "flush")

    def apply_all(self) -> None:
        """Applies every armed update; parameters that nothing has read yet remain pending."""
        held = [bundle for bundle in self._plan.bundles if bundle.held]
        for bundle in held:
            self._wait_applied(bundle, "flush")
        if held:
            self._streams.read()

    def wait_reduced(self) -> None:
        """Returns when nothing is on the wire."""
        if self._progress.outstanding:
            if any(bundle.coming for bundle in self._plan.bundles):
                self.waits_for_ranks()
            began = self._meter.moment()
            self._progress.wait(lambda: not self._progress.outstanding, "all gradients")
            self._meter.waited("backward", began, None)
        self._change()

    def wait_slots(self, slots: Sequence[Slot]) -> None:
        """Returns when gradients and updates of ``slots`` are there."""
        if self._progress.outstanding:
            began = self._meter.moment()
            self._progress.wait(
                lambda: not any(slot.bundle.sending for slot in slots), "the optimizer's gradients"
            )
            self._meter.waited("step", began, None)
        for slot in slots:
            if slot.bundle.held:
                self.synchronize(slot.bundle, "step")
            if (slot.changes or slot.looks) and not slot.taken:
                slot.change()

    def wait_unstepped(self) -> None:
        """Returns when nothing is on the wire that no ``step()`` has taken."""
        if self._progress.outstanding and any(
            bundle.sending and not bundle.armed for bundle in self._plan.bundles
        ):
            self.wait_reduced()
        else:
            self._change()

    def _change(self) -> None:
        """Makes changes that were noted of gradients which no ``step()`` has taken."""
        for slot in self._plan.slots:
            if slot.changes or slot.looks:
                self._change_one(slot)

    def _change_one(self, slot: Slot) -> None:
        if not slot.taken and not slot.sending and self.is_whole(slot):
            slot.change()

    def _synchronize_grad(self, slot: Slot) -> None:
        self._progress.refuse_in_update(f"{slot.name}.grad")
        bundle = slot.bundle
        if bundle.armed or bundle.held:
            # Held alone costs no wait of the host, but a write must come after the update.
            self.synchronize(bundle, f"{slot.name}.grad")
        else:
            waited_ns = 0
            if bundle.sending and not slot.is_awaited:
                began = self._meter.moment()
                self._progress.wait(lambda: not bundle.sending, f"the gradient of {slot.name!r}")
                waited_ns = self._meter.waited(f"{slot.name}.grad", began, bundle)
            self._meter.causes.read(slot.name, waited_ns)
        if self.complete is not None:
            self.complete(slot)
        if not slot.taken:
            slot.change()
        slot.is_read = True

    def fill_apart(self, slot: Slot) -> None:
        """Waits for the gradient of ``slot``, and puts it where the script sees it."""
        grad = slot.parameter.grad
        if grad is not None:
            self._synchronize_grad(slot)
            if lies_over(grad, slot.view):
                return
            if grad is slot.lazy:
                free(slot.lazy)
            with torch.no_grad():
                plain(grad).copy_(slot.view)

    def state(self) -> str:
        """In a few words, for ``repr()``."""
        held = sum(bundle.held for bundle in self._plan.bundles)
        left = self._progress.outstanding
        return f"{left} chunks outstanding, {held} bundles held, {self._plan!r}"
