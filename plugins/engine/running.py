"""A session after its warm-up: gradients are submitted as they come, and steps are armed."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from bytesched.errors import PluginError
from bytesched.round import UNTAKEN
from bytesched.tunable import Setting

from ..dependency.context import Context
from ..dependency.forked import disown
from ..dependency.gates import Gates
from ..dependency.lazy import give_back, is_left, kept_or_seen, moved
from ..dependency.synchronizing import Synchronizing
from ..layout.plan import Plan
from ..layout.slots import Slot
from ..proxies.lazy_grads import keep_apart, move_apart
from ..proxies.pending import release_held
from ..routes.carrier import Carrier, Traffic
from ..update.deferred import Deferred
from ..update.pending_updates import PendingUpdates
from ..update.updater import Updater
from ..warmup.retuning import Retuning

__all__ = ["Running"]


class Running:
    """The life of a session from its second round on (see phase.Phase).

    Args:
        setting: what training begins with.
        find_unused: whether parameters may get no gradient.
        retuning: changes the setting between two steps, if it is tuned.
    """

    def __init__(
        self,
        plan: Plan,
        gates: Gates,
        synchronizing: Synchronizing,
        carrier: Carrier,
        pending_updates: PendingUpdates,
        updater: Updater,
        context: Context,
        *,
        setting: Setting,
        find_unused: bool,
        retuning: Retuning | None,
    ) -> None:
        self.plan = plan
        self.setting = setting
        self.find_unused = find_unused
        self._gates = gates
        self._synchronizing = synchronizing
        self._carrier = carrier
        self._pending_updates = pending_updates
        self._updater = updater
        self._progress = context.progress
        self._round = context.progress.round
        self._streams = context.streams
        self._meter = context.meter
        self._rank = context.backend.rank
        self._retuning = retuning

    # -- forward -----------------------------------------------------------------------

    def before_forward(self, steps: int) -> None:
        if self._retuning is not None:
            self._retuning.before_forward(steps)

    def forward_begins(self) -> None:
        # Backward would add to gradients on the wire.
        self._synchronizing.wait_unstepped()

    def forward_ends(self) -> None:
        pass

    # -- a round -----------------------------------------------------------------------

    def begin_round(self, *, forward_seen: bool) -> None:
        """Makes the arena free for the gradients of a new round."""
        plan = self.plan
        # A gradient that was zeroed or taken away since then is no sum of both.
        if not forward_seen and any(
            s.state in UNTAKEN and s.parameter.grad is s.lazy for s in plan.slots
        ):
            raise PluginError(
                f"backward() ran again on rank {self._rank} without a forward pass of the "
                "wrapped model, a step() or zero_grad() in between: gradients of the first may "
                "still be on the wire"
            )
        self._synchronizing.wait_reduced()
        self._synchronizing.apply_all()
        for slot in kept_or_seen(plan.slots):
            keep_apart(slot.lazy)
            self._synchronizing.make_lazy(slot)
        plan.flags_reduced = False
        with self._progress.lock:
            self._round.begin()
        self._meter.round_begins()

    def gradient(self, slot: Slot) -> None:
        if not slot.take_gradient():
            self._refuse(slot)
        for chunk in self._round.gradient(slot):
            self._streams.backward_done(chunk, self._carrier.submit)

    def _refuse(self, slot: Slot) -> NoReturn:
        """Plain DDP goes on without reducing, and its ranks drift apart."""
        grad, view = slot.parameter.grad, slot.view
        assert grad is not None
        raise PluginError(
            f"the gradient of {slot.name!r} is {grad.dtype} on {grad.device}, it was "
            f"{view.dtype} on {view.device}: unwrap before the model is converted, and wrap it in "
            "a new DistributedDataParallel"
        )

    def end_round(self) -> Running:
        if self.find_unused:
            self._complete()
        self.hand_out()
        return self

    def _complete(self) -> None:
        """Sends zeros for parameters without a gradient; finds out who got one elsewhere."""
        plan = self.plan
        missing = self._round.absentees()
        assert plan.used_flags is not None
        assert plan.flags_chunk is not None
        computed = [int(s.state in UNTAKEN or s.is_local) for s in plan.slots]
        plan.used_flags.copy_(torch.tensor(computed, dtype=torch.int32))
        if plan.flags_chunk.notify_ready():
            self._streams.backward_done(plan.flags_chunk, self._carrier.submit)
        for slot in plan.slots:
            slot.is_local = False
        #: in memory that this round's sums overwrite
        earlier: dict[Slot, torch.Tensor] = {}
        for slot in missing:
            # It may have a gradient from passes under no_sync(), which DDP reduces now.
            if slot.parameter.grad is not None:
                if is_left(slot):
                    earlier[slot] = slot.view.clone()
                if not slot.take_gradient():
                    self._refuse(slot)
            for chunk in self._round.absent(slot):
                self._streams.backward_done(chunk, self._carrier.submit)
        if missing:
            self._progress.wait(lambda: plan.flags_reduced, "the map of used parameters")
            ranks = zip(plan.slots, plan.used_flags.tolist(), strict=True)
            with self._progress.lock:
                self._round.found({slot: count > 0 for slot, count in ranks})
        for slot, gradient in earlier.items():
            # No rank has used it: its gradient stays what it was, as in plain DDP.
            if slot.state not in UNTAKEN:
                move_apart(slot.lazy, gradient)

    def hand_out(self) -> None:
        """Gradients of this round become lazy views of what is reduced, or what they stand for."""
        used = [slot for slot in self.plan.slots if slot.state in UNTAKEN]
        lazy = [slot for slot in used if not slot.is_apart]
        for slot in moved(lazy):
            self._synchronizing.make_lazy(slot)
        for slot in lazy:
            slot.is_read = False
            slot.parameter.grad = slot.lazy
        for slot in used:
            if slot.is_apart:
                self._synchronizing.fill_apart(slot)

    def wait_reduced(self) -> None:
        self._synchronizing.wait_reduced()

    # -- step --------------------------------------------------------------------------

    def introduce(self, deferred: Deferred) -> None:
        self._pending_updates.introduce(deferred)

    def step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]] | None:
        return self._pending_updates.step(deferred, whole_because=whole_because)

    def stepped(self) -> None:
        self._pending_updates.stepped()

    def synchronize_all(self) -> None:
        self._synchronizing.synchronize_all()

    # -- from outside ------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        return self._carrier.traffic

    @property
    def order(self) -> str:
        return self._carrier.order

    def state(self) -> str:
        return self._synchronizing.state()

    def disown(self) -> None:
        disown(self._round, self.plan, give_back)

    def close(self, *, release_parameters: bool) -> None:
        self._gates.remove()
        self._carrier.close()
        self._updater.close()
        if release_parameters:
            release_held(slot.parameter for slot in self.plan.slots)
            for slot in self.plan.slots:
                give_back(slot)
