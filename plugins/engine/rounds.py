"""Rounds: what happens between the first gradient of a backward pass and its last.

A round is one synchronised backward pass, or several that complete each other (two losses over
one forward pass). Every parameter takes part in it exactly once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from types import FrameType
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from bytesched.errors import PluginError, UnusedParameterError
from bytesched.round import GradientState

from ..dependency.context import Context
from ..layout.slots import Slot
from ..planned.turns import ModelTurns
from ..routes.handover import Handover
from .phase import Phase

__all__ = ["Rounds"]

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
        handover: whether gradients are the session's at the moment.
        static_graph: a parameter may be used several times, the same in each round.
        phase: that of the first round.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        context: Context,
        handover: Handover,
        *,
        static_graph: bool,
        phase: Phase,
    ) -> None:
        self.slots = slots
        #: what is done with gradients and steps at the moment
        self.phase = phase
        #: whether the backward pass of the last forward pass is to be reduced
        self.sync = True
        #: the model was called since the round began
        self.forward_seen = False
        #: rounds that came to their end
        self.finished = 0
        #: on a device that several jobs share
        self.turns: ModelTurns | None = None
        self._rank = context.backend.rank
        self._progress = context.progress
        self._round = context.progress.round
        self._streams = context.streams
        self._meter = context.meter
        self._handover = handover
        #: until the first round is over: how often a parameter is used is only counted
        self._counts_uses = static_graph
        self._callback_queued = False

    def hook(self, slot: Slot) -> Callable[[], None]:
        """Takes part in the gradient of ``slot``; returns what takes the hook off again."""
        on_grad = partial(self._on_grad, slot)
        handle: RemovableHandle = slot.parameter.register_post_accumulate_grad_hook(on_grad)
        slot.hook_id = handle.id
        return handle.remove

    @property
    def incomplete(self) -> bool:
        """True while some parameter has no gradient in the current round."""
        return self._round.incomplete

    def complain_if_interrupted(self) -> None:
        """Raises PluginError if an exception ended the last backward pass: it was sent in part."""
        if self._callback_queued and torch._C._current_graph_task_id() == -1:
            error = PluginError(
                f"an exception ended the last backward() on rank {self._rank} when some of "
                "its gradients had been sent already; unwrap, and wrap again to go on"
            )
            self._progress.fail(error, is_raised=True)
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
        self._progress.fail(error, is_raised=True)
        raise error

    # -- a gradient --------------------------------------------------------------------

    def _on_grad(self, slot: Slot, parameter: torch.Tensor) -> None:
        if self._handover.off:
            return
        if not self.sync:
            slot.is_local = True
            return
        if not self._callback_queued:
            self._queue_callback()
        self._gradient(slot)

    def _queue_callback(self) -> None:
        self._callback_queued = True
        Variable._execution_engine.queue_callback(self._after_backward)

    def _gradient(self, slot: Slot) -> None:
        """On the critical path of every parameter's backward: few calls."""
        began_ns = perf_counter_ns()
        if not self._round.is_open:
            self._begin()
        slot.fired += 1
        if slot.fired != slot.expected or slot.state is GradientState.UNREAD:
            self._check_gradient(slot)
            return
        if self._streams.are_several:
            self._streams.gradient()
        self.phase.gradient(slot)
        self._meter.hook_ns += perf_counter_ns() - began_ns

    def _check_gradient(self, slot: Slot) -> None:
        if slot.state is GradientState.UNREAD:
            raise PluginError(
                f"{slot.name!r} got a gradient on rank {self._rank}, but nothing has read "
                "it since step(): it is read by code that cannot be seen from Python, or the "
                "forward pass ran before step(). Wrap with cross_barrier=False"
            )
        if slot.fired > slot.expected and not self._counts_uses:
            raise PluginError(
                f"parameter {slot.name!r} got a second gradient in one round on rank "
                f"{self._rank}. Either it is used in several reentrant checkpoints, or "
                "backward() ran twice on one graph (use no_sync() or static_graph=True), or an "
                "earlier backward() was interrupted by an exception"
            )

    # -- begin -------------------------------------------------------------------------

    def _begin(self) -> None:
        self._progress.check()
        self.phase.begin_round(forward_seen=self.forward_seen)
        if self.turns is not None:
            self.turns.backward_begins()
        self.forward_seen = False

    # -- end ---------------------------------------------------------------------------

    def _after_backward(self) -> None:
        self._callback_queued = False
        if self._round.missing and (not self.phase.find_unused or _is_nested()):
            # The pass around this one, or that of another loss, may bring the rest.
            return
        self._finish()

    def finish(self) -> None:
        """Ends the round, at the latest, when ``step()`` is called."""
        self.complain_if_interrupted()
        if self._round.incomplete and self.phase.find_unused:
            self._finish()
        self._complain_if_incomplete()

    def _finish(self) -> None:
        if self.turns is not None:
            self.turns.backward_ends()
        self.finished += 1
        phase = self.phase.end_round()
        if phase is not self.phase:
            self._enter(phase)
        self._round.end()
        self._meter.backward_ends()

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        for slot in self.slots:
            # The user's own hooks, which may change the gradient, come before ours. Autograd
            # reads the dictionary beneath an OrderedDict: move_to_end would not do.
            hooks: Any = slot.parameter._post_accumulate_grad_hooks
            if slot.hook_id != -1:
                hooks[slot.hook_id] = hooks.pop(slot.hook_id)
            if self._counts_uses:
                slot.expected = max(1, slot.fired)
        self._counts_uses = False
