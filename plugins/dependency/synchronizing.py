"""Synchronizing: waiting for exactly what is needed, a gradient or an update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn

from bytesched.round import OUTSTANDING, TO_COME, BundleState, GradientState

from ..figures.meter import Meter
from ..layout.memory import lies_over
from ..layout.plan import Plan
from ..layout.slots import Bundle, Slot
from ..proxies.compiling import waiting
from ..proxies.lazy_grads import free, plain
from ..proxies.pending import release_held
from ..proxies.spans import span
from ..routes.streams import Streams
from .progress import Progress

__all__ = ["Synchronizing"]


class Synchronizing:
    """What the gates of one model call, in the thread of forward, backward or step."""

    def __init__(
        self,
        plan: Plan,
        progress: Progress,
        streams: Streams,
        meter: Meter,
    ) -> None:
        self._plan = plan
        self._progress = progress
        self._round = progress.round
        self._streams = streams
        self._meter = meter
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
        if bundle.state is BundleState.APPLIED:
            self._streams.read()
            with self._progress.lock:
                self._round.use(bundle)
            # A parameter that was not read in this round may be held since an earlier one.
            release_held([slot.parameter for slot in bundle.slots])

    def _wait_applied(self, bundle: Bundle, by: str) -> None:
        if bundle.state not in OUTSTANDING:
            return
        began = self._meter.moment()
        with waiting(), span("bytesched::wait"):
            self._progress.wait(
                lambda: bundle.state not in OUTSTANDING,
                f"the update of {bundle.slots[0].name!r}",
            )
        self._meter.waited(by, began, _numbers(bundle))

    def gate(self, bundles: Sequence[Bundle], name: str, module: nn.Module) -> None:
        """In front of every call of ``module``: on the critical path of the forward pass."""
        for bundle in bundles:
            if bundle.state is not BundleState.FREE:
                self.synchronize(bundle, name)
        if not (torch.is_grad_enabled() or module.training):
            # Evaluation may take fast paths that look at the types of all parameters at once.
            self.synchronize_all()

    def synchronize_all(self) -> None:
        """Applies every armed update."""
        # Whole steps come here for every parameter.
        if not self._round.held:
            return
        for bundle in self._plan.bundles:
            if bundle.state is not BundleState.FREE:
                self.synchronize(bundle, "flush")

    def apply_all(self) -> None:
        """Applies every armed update; parameters that nothing has read yet remain pending."""
        held = [b for b in self._plan.bundles if b.state is not BundleState.FREE]
        for bundle in held:
            self._wait_applied(bundle, "flush")
        if held:
            self._streams.read()

    def wait_reduced(self) -> None:
        """Returns when nothing is on the wire."""
        if self._round.unsummed:
            began = self._meter.moment()
            self._progress.wait(lambda: not self._round.unsummed, "all gradients")
            self._meter.waited("backward", began)

    def wait_slots(self, slots: Sequence[Slot]) -> None:
        """Returns when gradients and updates of ``slots`` are there."""
        if self._round.unsummed:
            began = self._meter.moment()
            chunks = set().union(*(slot.bundle.chunks for slot in slots))
            self._progress.wait(lambda: not self._round.sums(chunks), "the optimizer's gradients")
            self._meter.waited("step", began)
        for slot in slots:
            if slot.bundle.state is not BundleState.FREE:
                self.synchronize(slot.bundle, "step")

    def wait_unstepped(self) -> None:
        """Returns when nothing is on the wire that no ``step()`` has taken."""
        if self._round.unsummed and any(
            bundle.state not in OUTSTANDING and self._round.sums(bundle.chunks)
            for bundle in self._plan.bundles
        ):
            self.wait_reduced()

    def _synchronize_grad(self, slot: Slot) -> None:
        self._progress.refuse_in_update(f"{slot.name}.grad")
        bundle = slot.bundle
        if slot.is_read and slot.state is GradientState.SUMMED and bundle.state is BundleState.FREE:
            # It was read in this round, and is what it was then.
            return
        if bundle.state is not BundleState.FREE:
            # Held alone costs no wait of the host, but a write must come after the update.
            self.synchronize(bundle, f"{slot.name}.grad")
        else:
            waited_ns = 0
            chunks = bundle.chunks
            if self._round.sums(chunks) and slot.state not in TO_COME:
                began = self._meter.moment()
                self._progress.wait(
                    lambda: not self._round.sums(chunks), f"the gradient of {slot.name!r}"
                )
                waited_ns = self._meter.waited(f"{slot.name}.grad", began, _numbers(bundle))
            self._meter.causes.read(slot.name, waited_ns)
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
        left = self._progress.outstanding
        return f"{left} chunks outstanding, {self._round.held} bundles held, {self._plan!r}"


def _numbers(bundle: Bundle) -> Iterator[int]:
    return (chunk.index for chunk in bundle.chunks)
