"""Rounds: what happens between the first gradient of a backward pass and its last.

A round is one synchronised backward pass, or several that complete each other (two losses over
one forward pass). Every parameter takes part in it exactly once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from sys import getrefcount
from time import perf_counter_ns
from types import FrameType
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from bytesched.errors import PluginError, UnusedParameterError
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.proxies.pending import free, has_own_memory, keep_apart, plain
from bytesched.plugins.session.meter import Meter
from bytesched.plugins.session.progress import Progress
from bytesched.plugins.session.settling import Settling
from bytesched.plugins.session.streams import Streams
from bytesched.task import CommTask

__all__ = ["Rounds"]


def _own_references() -> int:
    """What getrefcount says of a lazy gradient that the slot and a local variable refer to."""
    holder = [object()]
    lazy = holder[0]
    return getrefcount(lazy)


_OWN_REFERENCES = _own_references()

#: through which every custom Function's backward is called, also those that run backward again
_CUSTOM_BACKWARD = BackwardCFunction.apply.__code__


def _is_nested() -> bool:
    """True inside a backward pass that another one runs (a reentrant checkpoint)."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CUSTOM_BACKWARD:
            return True
        frame = frame.f_back
    return False


class Rounds:
    """The gradient hooks of one model.

    Args:
        slots: the parameters.
        rank: this one, for messages.
        progress: how far this round is.
        streams: told where gradients are queued.
        meter: told about hooks and backward passes.
        find_unused: True if parameters may get no gradient; None if the warm-up shall tell.
        static_graph: a parameter may be used several times, the same in each round.
        warm_up: reduces the first round as a whole.
    """

    def __init__(
        self,
        slots: list[Slot],
        rank: int,
        progress: Progress,
        streams: Streams,
        meter: Meter,
        *,
        find_unused: bool | None,
        static_graph: bool,
        warm_up: Callable[[], None],
    ) -> None:
        self.slots = slots
        self.find_unused = find_unused
        #: whether the backward pass of the last forward pass is to be reduced
        self.sync = True
        #: the model was called since the round began
        self.forward_seen = False
        #: gradients are not the session's at the moment
        self.off = False
        #: rounds that came to their end
        self.finished = 0
        self._rank = rank
        self._progress = progress
        self._streams = streams
        self._meter = meter
        self._static_graph = static_graph
        self._warm_up = warm_up
        self._open = False
        self._callback_queued = False
        self._missing = 0
        # - after the warm-up
        self._plan: Plan | None = None
        self._settling: Settling
        self._submit: Callable[[CommTask], None]

    def hook(self, slot: Slot) -> Callable[[], None]:
        """Takes part in the gradient of ``slot``; returns what takes the hook off again."""
        on_grad = partial(self._on_grad, slot)
        handle: RemovableHandle = slot.parameter.register_post_accumulate_grad_hook(on_grad)
        slot.hook_id = handle.id
        return handle.remove

    def activate(self, plan: Plan, settling: Settling, submit: Callable[[CommTask], None]) -> None:
        """The warm-up is over: from the next round on, ready chunks go to ``submit``."""
        self.slots = plan.slots
        self._plan = plan
        self._settling = settling
        self._submit = submit
        for slot in plan.slots:
            # The user's own hooks, which may change the gradient, come before ours. Autograd
            # reads the dictionary beneath an OrderedDict: move_to_end would not do.
            hooks: Any = slot.parameter._post_accumulate_grad_hooks
            if slot.hook_id != -1:
                hooks[slot.hook_id] = hooks.pop(slot.hook_id)
        if self._static_graph:
            for slot in plan.slots:
                slot.expected = max(1, slot.fired)

    @property
    def incomplete(self) -> bool:
        """True while some parameter has no gradient in the current round."""
        return self._open and self._missing > 0

    def complain_if_interrupted(self) -> None:
        """Raises PluginError if an exception ended the last backward pass: it was sent in part."""
        if self._callback_queued and torch._C._current_graph_task_id() == -1:
            error = PluginError(
                f"an exception ended the last backward() on rank {self._rank} when some of "
                "its gradients had been sent already; unwrap, and wrap again to go on"
            )
            self._progress.fail(error)
            raise error

    def _complain_if_incomplete(self) -> None:
        if not self.incomplete:
            return
        names = [slot.name for slot in self.slots if not slot.fired]
        error = UnusedParameterError(
            f"{len(names)} parameters got no gradient on rank {self._rank}: "
            f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}. If that may happen, say "
            "find_unused_parameters=True to DistributedDataParallel, or to bytesched.wrap for a "
            "plain module"
        )
        self._progress.fail(error)
        raise error

    # -- a gradient --------------------------------------------------------------------

    def _on_grad(self, slot: Slot, parameter: torch.Tensor) -> None:
        if self.off:
            return
        if self.sync:
            self.backward_gradient(slot)
        else:
            slot.used_alone = True

    def backward_gradient(self, slot: Slot) -> None:
        """``slot`` has its gradient. On the critical path of every parameter's backward."""
        if not self._callback_queued:
            self._callback_queued = True
            Variable._execution_engine.queue_callback(self._after_backward)
        self._gradient(slot)

    def _gradient(self, slot: Slot) -> None:
        began_ns = perf_counter_ns()
        if not self._open:
            self._begin()
        slot.fired += 1
        if slot.fired != slot.expected or slot.unguarded:
            self._check_gradient(slot)
            return
        self._missing -= 1
        slot.used = True
        self._streams.gradient()
        if self._plan is not None:
            self._take(slot)
            self._source_ready(slot)
        self._meter.hook_ns += perf_counter_ns() - began_ns

    def _take(self, slot: Slot) -> None:
        assert slot.parameter.grad is not None
        grad = plain(slot.parameter.grad)
        if grad.dtype is not slot.view.dtype or grad.device != slot.view.device:
            raise PluginError(
                f"the gradient of {slot.name!r} is {grad.dtype} on {grad.device}, it was "
                f"{slot.view.dtype} on {slot.view.device}: unwrap before the model is converted"
            )
        slot.grad = grad.detach() if grad.requires_grad else grad

    def _source_ready(self, slot: Slot) -> None:
        for chunk in slot.chunks:
            if chunk.notify_ready():
                self._submit(chunk)

    def _check_gradient(self, slot: Slot) -> None:
        if slot.unguarded:
            raise PluginError(
                f"{slot.name!r} got a gradient on rank {self._rank}, but nothing has read "
                "it since step(): it is read by code that cannot be seen from Python, or the "
                "forward pass ran before step(). Wrap with cross_barrier=False"
            )
        if slot.fired > slot.expected and not (self._plan is None and self._static_graph):
            raise PluginError(
                f"parameter {slot.name!r} got a second gradient in one round on rank "
                f"{self._rank}. Either it is used in several reentrant checkpoints, or "
                "backward() ran twice on one graph (use no_sync() or static_graph=True), or an "
                "earlier backward() was interrupted by an exception"
            )

    # -- begin -------------------------------------------------------------------------

    def _begin(self) -> None:
        self._progress.check()
        if self._plan is not None:
            self._reuse(self._plan)
        for slot in self.slots:
            slot.fired = 0
            slot.used = slot.taken = False
            slot.sending = len(slot.chunks)
        self._missing = len(self.slots)
        self._open = True
        self.forward_seen = False

    def _reuse(self, plan: Plan) -> None:
        """Makes the arena free for the gradients of a new round."""
        if not self.forward_seen and any(slot.used for slot in self.slots):
            raise PluginError(
                f"backward() ran again on rank {self._rank} without a forward pass of the "
                "wrapped model or a step() in between: gradients of the first may still be on "
                "the wire"
            )
        for bundle in plan.bundles:
            for slot in bundle.slots:
                slot.unguarded = slot.taken and bundle.held
        self._settling.wait_reduced()
        self._settling.apply_all()
        for slot in self.slots:
            if self._is_kept(slot):
                keep_apart(slot.lazy)
                self._settling.make_lazy(slot)
        for bundle in plan.bundles:
            bundle.sending = len(bundle.chunks)
        plan.flags_reduced = False
        self._progress.outstanding = len(plan.chunks)

    def _is_kept(self, slot: Slot) -> bool:
        """True if the user has put the lazy gradient aside: it is to keep its values."""
        lazy = slot.lazy
        return getrefcount(lazy) > _OWN_REFERENCES and slot.parameter.grad is not lazy

    def give_back(self, slot: Slot) -> None:
        """Makes the gradient of ``slot`` an ordinary tensor, for good."""
        if self._is_kept(slot):
            keep_apart(slot.lazy)
        if slot.parameter.grad is slot.lazy:
            slot.parameter.grad = plain(slot.lazy)
        free(slot.lazy)

    # -- end ---------------------------------------------------------------------------

    def _after_backward(self) -> None:
        self._callback_queued = False
        if self._missing and (self.find_unused is False or _is_nested()):
            # The pass around this one, or that of another loss, may bring the rest.
            return
        self._finish()

    def finish(self) -> None:
        """Ends the round, at the latest, when ``step()`` is called."""
        self.complain_if_interrupted()
        if self._open and self._missing and self.find_unused is not False:
            self._finish()
        self._complain_if_incomplete()

    def complete(self) -> None:
        """Ends the round outside of backward: what got no gradient takes part with what it has.

        That is an earlier gradient, or zeros. Without an open round, a new one is made of these.
        """
        self.complain_if_interrupted()
        self.forward_seen = True
        if not self._open:
            self._begin()
        for slot in self.slots:
            if not slot.fired:
                # No backward pass has read it, guarded or not.
                slot.unguarded = False
                if slot.parameter.grad is None:
                    slot.parameter.grad = torch.zeros_like(slot.parameter)
                self._gradient(slot)
        self._finish()

    def _finish(self) -> None:
        self.finished += 1
        if self._plan is None:
            self._warm_up()
        elif self.find_unused:
            self._close(self._plan)
        for slot in self.slots:
            if slot.used:
                if has_own_memory(slot.lazy):
                    self._settling.make_lazy(slot)
                slot.parameter.grad = slot.lazy
        self._open = False
        self._meter.backward_ends()

    def _close(self, plan: Plan) -> None:
        """Sends zeros for parameters without a gradient; finds out who got one elsewhere."""
        missing = [slot for slot in self.slots if not slot.used]
        assert plan.used_flags is not None
        assert plan.flags_chunk is not None
        plan.used_flags.copy_(
            torch.tensor([int(s.used or s.used_alone) for s in plan.slots], dtype=torch.int32)
        )
        if plan.flags_chunk.notify_ready():
            self._submit(plan.flags_chunk)
        for slot in self.slots:
            slot.used_alone = False
        for slot in missing:
            # It may have a gradient from passes under no_sync(), which DDP reduces now.
            if slot.parameter.grad is not None:
                self._take(slot)
            self._source_ready(slot)
        if missing:
            self._progress.wait(lambda: plan.flags_reduced, "the map of used parameters")
            for slot, ranks in zip(plan.slots, plan.used_flags.tolist(), strict=True):
                slot.used = ranks > 0
