"""One wrapped model: its parts, and the order in which they come to life."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from bytesched.config import Config
from bytesched.observe import Observers
from bytesched.plugins.c10d import C10dTransport, Group
from bytesched.plugins.first_use import FirstUse, StayingForwardHook, StayingHook, gate
from bytesched.plugins.meter import Meter
from bytesched.plugins.pending import is_held, release
from bytesched.plugins.plan import Plan, Slot
from bytesched.plugins.progress import Progress
from bytesched.plugins.rounds import Rounds
from bytesched.plugins.sending import Sending
from bytesched.plugins.settling import Settling
from bytesched.plugins.stepping import Stepping
from bytesched.plugins.streams import streams_for
from bytesched.plugins.updater import Updater
from bytesched.plugins.warmup import WarmUp

__all__ = ["Session"]

log = logging.getLogger("bytesched")


class Session:
    """The life of one wrapped model.

    The first round is the warm-up: it is reduced as a whole, while the order of first use and
    the link are learned. From the second on, chunks are sent as their gradients arrive (Rounds,
    Sending), ``step()`` arms their updates (Stepping, Updater), and parameters guard themselves
    (Settling).

    Args:
        root: the module whose call is a forward pass (the DDP object, if there is one).
        slots: the parameters that are reduced, in registration order, the same on all ranks.
        config: the settings; partition and credit are still 0 if they are to be chosen.
        data: the group that gradients travel on.
        control: the group that the leader's order travels on.
        buffers: the group that buffers travel on, if there are any.
        sync: whether the backward pass of the forward pass that begins now is to be reduced.
        find_unused: True if parameters may get no gradient; None if the warm-up shall tell.
        static_graph: a parameter may be used several times, the same in each round.
    """

    def __init__(
        self,
        root: nn.Module,
        slots: Sequence[Slot],
        config: Config,
        *,
        data: Group,
        control: Group,
        buffers: Group | None = None,
        sync: Callable[[], bool],
        find_unused: bool | None,
        static_graph: bool,
        observers: Observers,
    ) -> None:
        self.root = root
        self.plan: Plan | None = None
        self._config = config
        self._data = data
        self._control = control
        self._sync = sync
        self._observers = observers
        self._closed = False
        self._undo: list[Callable[[], None]] = []
        self._meter = Meter(observers, len(slots))
        groups = (data, control) if buffers is None else (data, control, buffers)
        self._progress = Progress(groups, timeout_s=config.timeout_s)
        self._streams = streams_for(slots[0].parameter.device, self._progress.fail)
        self._first_use = FirstUse(root, [slot.parameter for slot in slots])
        self._rounds = Rounds(
            list(slots),
            data,
            self._progress,
            self._streams,
            self._meter,
            find_unused=find_unused,
            static_graph=static_graph,
            warm_up=self._warm_up,
        )
        self._stepping = Stepping(self._rounds, self._progress, self._streams, self._meter)
        # - after the warm-up
        self._settling: Settling
        self._updater: Updater
        self._sending: Sending
        try:
            self._hook()
        except BaseException:
            self.close()
            raise

    def _hook(self) -> None:
        for slot in self._rounds.slots:
            self._undo.append(self._rounds.hook(slot))
        before = StayingHook(self._before_forward, self._inside_compiled)
        self._undo.append(self.root.register_forward_pre_hook(before, prepend=True).remove)
        after = StayingForwardHook(self._after_forward)
        self._forward_hook = self.root.register_forward_hook(after, always_call=True)
        self._undo.append(self._forward_hook.remove)

    def add_optimizer(self, optimizer: torch.optim.Optimizer, *, cross: bool) -> None:
        """Updates of ``optimizer`` are deferred from now on, if it may cross the barrier."""
        self._undo.extend(self._stepping.add(optimizer, cross=cross))

    def on_close(self, undo: Callable[[], None]) -> None:
        """Calls ``undo`` after every hook has been taken off."""
        self._undo.insert(0, undo)

    # -- forward -----------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            if not module.training:
                self._settle_all()
            return
        self._progress.check()
        self._rounds.complain_if_interrupted()
        self._streams.begin()
        self._rounds.sync = self._sync()
        if self._rounds.sync:
            self._rounds.finish()
        self._rounds.forward_seen = True
        self._meter.forward_begins()
        if self.plan is None:
            self._first_use.begin()
        else:
            # Backward would add to gradients on the wire.
            self._settling.wait_unstepped()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.plan is None:
            self._first_use.end()
        if torch.is_grad_enabled():
            self._meter.forward_ends()

    def _inside_compiled(self) -> None:
        """Compiled code contains our hooks, so that nothing can wait in front of it."""
        self._first_use.end()
        if self._stepping.crosses:
            self._stepping.stop_crossing()
            log.warning(
                "torch.compile was applied after bytesched.wrap: scheduling inside backward, "
                "stepping whole; wrap the compiled model to cross the barrier"
            )

    # -- the warm-up, in the user's thread at the end of the first round ---------------

    def _warm_up(self) -> None:
        self._first_use.close()
        warm = WarmUp(self._data, self._config, self._rounds.slots, cpu_load=self._meter.cpu_load())
        plan = warm.reduce(self._first_use.order(), find_unused=self._rounds.find_unused)
        if self._rounds.find_unused is None:
            self._rounds.find_unused = warm.unused
        self._settling = Settling(plan, self._progress, self._streams, self._meter)
        self._updater = Updater(self._progress, self._streams, self._meter)
        self._sending = Sending(
            plan,
            C10dTransport(self._data, warm.packer, self._streams),
            self._control,
            config=self._config,
            credit_bytes=warm.credit_bytes,
            progress=self._progress,
            updater=self._updater,
            streams=self._streams,
            observers=self._observers,
        )
        self._rounds.activate(plan, self._settling, self._sending.submit)
        self._stepping.activate(self._settling, self._updater)
        self._raise_gates(plan)
        self._meter.active(plan, warm)
        self.plan = plan
        if not self._observers:
            # Only the warm-up needs it, and without bytesched its pickle cannot be loaded.
            self._forward_hook.remove()
        if self._data.rank == 0:
            log.info(
                "%d ranks, %r, partition %.0f KiB, credit %.0f KiB, policy %s, mode %s",
                self._data.size,
                plan,
                warm.partition_bytes / 1024,
                warm.credit_bytes / 1024,
                self._config.policy,
                self.mode,
            )

    def _raise_gates(self, plan: Plan) -> None:
        names = {module: name for name, module in self.root.named_modules()}
        slots = {id(slot.parameter): slot for slot in plan.slots}
        used = {key for key, slot in slots.items() if slot.used}
        for module, parameters in self._first_use.gates(lambda p: id(p) in used).items():
            bundles = {slots[id(parameter)].bundle for parameter in parameters}
            ordered = sorted(bundles, key=lambda bundle: bundle.index)
            name = names.get(module) or type(module).__name__
            wait = partial(self._settling.gate, ordered, name)
            self._undo.append(gate(module, wait, self._inside_compiled))

    # -- from outside ------------------------------------------------------------------

    @property
    def mode(self) -> str:
        """The rung of the ladder: "cross" the barrier, or schedule inside "backward" only."""
        return "cross" if self._stepping.crosses else "backward"

    @property
    def error(self) -> BaseException | None:
        """The first error, which is final."""
        return self._progress.error

    def fail(self, error: BaseException) -> None:
        """Ends everything under way, on every rank."""
        self._progress.fail(error)

    def flush(self) -> None:
        """Everything that was started is reduced, and everything armed is applied."""
        self._progress.check()
        if self.plan is not None and not self._rounds.incomplete:
            self._settling.wait_reduced()
        self._settle_all()

    def _settle_all(self) -> None:
        if self.plan is not None:
            self._settling.settle_all()

    def close(self, *, release_parameters: bool = True) -> None:
        """Takes every hook off and stops every thread; does not flush. Idempotent.

        Parameters whose update is outstanding become ordinary ones, with the value they have,
        unless ``release_parameters`` is false: then reading them raises the first error.
        """
        if self._closed:
            return
        self._closed = True
        self._first_use.close()
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception:
                log.exception("a hook could not be taken off")
        self._streams.close()
        if self.plan is not None:
            self._sending.close()
            self._updater.close()
            for slot in self.plan.slots:
                if release_parameters and is_held(slot.parameter):
                    release(slot.parameter)
                if release_parameters:
                    self._rounds.give_back(slot)
        self._data.close()
        self._observers.close()

    def stats(self) -> dict[str, int | float | str]:
        """Figures since the warm-up; see the README for their meaning."""
        active = self.plan is not None
        return {
            **self._meter.figures(self._sending.scheduler if active else None),
            "mode": self.mode,
            "order": self._sending.order if active else "leader",
            "rank": self._data.rank,
            "world_size": self._data.size,
        }

    def __repr__(self) -> str:
        if self.error is not None:
            state = f"failed: {self.error}"
        elif self.plan is None:
            state = "warming up"
        else:
            held = sum(bundle.held for bundle in self.plan.bundles)
            left = self._progress.outstanding
            state = f"{left} chunks outstanding, {held} bundles held, {self.plan!r}"
        return f"<bytesched rank {self._data.rank} of {self._data.size}: {state}>"
