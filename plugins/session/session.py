"""One wrapped model: its parts, and the order in which they come to life."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bytesched.config import Config
from bytesched.observe import Observers
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.proxies.first_use import StayingForwardHook, StayingHook
from bytesched.plugins.session.backend import Backend
from bytesched.plugins.session.carrier import Carrier, Traffic
from bytesched.plugins.session.changing import Changing, Parts
from bytesched.plugins.session.gates import Gates
from bytesched.plugins.session.hooked import HookedModel
from bytesched.plugins.session.retuning import Retuning
from bytesched.plugins.session.rounds import Rounds
from bytesched.plugins.session.sending import Sending
from bytesched.plugins.session.settling import Settling
from bytesched.plugins.session.stepping import Stepping
from bytesched.plugins.session.updater import Updater
from bytesched.plugins.session.warmup import WarmUp
from bytesched.tunable import Setting, find_tuner

__all__ = ["Session"]

log = logging.getLogger("bytesched")


class Session(HookedModel):
    """The life of one wrapped model.

    The first round is the warm-up: it is reduced as a whole, while the order of first use and
    the link are learned. From the second on, chunks are sent as their gradients arrive (Rounds,
    Sending), ``step()`` arms their updates (Stepping, Updater), and parameters guard themselves
    (Settling).

    Args:
        root: the module whose call is a forward pass (the DDP object, if there is one).
        slots: the parameters that are reduced, in registration order, the same on all ranks.
        config: the settings; partition and credit are still 0 if they are to be chosen.
        backend: the ranks, and what they reduce with.
        sync: whether the backward pass of the forward pass that begins now is to be reduced;
            None if ``backward_gradient`` is called for every gradient that is.
        find_unused: True if parameters may get no gradient; None if the warm-up shall tell.
        static_graph: a parameter may be used several times, the same in each round.
    """

    def __init__(
        self,
        root: nn.Module,
        slots: Sequence[Slot],
        config: Config,
        *,
        backend: Backend,
        sync: Callable[[], bool] | None,
        find_unused: bool | None,
        static_graph: bool,
        observers: Observers,
    ) -> None:
        super().__init__(root, slots, backend, observers)
        self._config = config
        self._sync = sync
        self._rounds = Rounds(
            list(slots),
            backend.rank,
            self._progress,
            self._streams,
            self._meter,
            find_unused=find_unused,
            static_graph=static_graph,
            warm_up=self._warm_up,
        )
        self._stepping = Stepping(self._rounds, self._progress, self._streams, self._meter)
        self._changing = Changing(self._rounds, self._stepping, self._meter)
        self._retuning: Retuning | None = None
        if config.tune and backend.knobs:
            tuner = find_tuner(config) if backend.rank == 0 else None
            device = slots[0].parameter.device
            self._retuning = Retuning(tuner, backend, device, self._streams, self._changing)
            self._undo.append(self._retuning.close)
        elif config.tune and backend.rank == 0:
            log.warning("tune is on, but nothing can change at run time over %s", backend.wire)
        # - after the warm-up
        self._sending: Sending
        self._carrier: Carrier
        try:
            self._hook()
        except BaseException:
            self.close()
            raise

    def _hook(self) -> None:
        if self._sync is not None:
            for slot in self._rounds.slots:
                self._undo.append(self._rounds.hook(slot))
        before = StayingHook(self.before_forward, self._inside_compiled)
        self._undo.append(self.root.register_forward_pre_hook(before, prepend=True).remove)
        after = StayingForwardHook(self._after_forward)
        self._forward_hook = self.root.register_forward_hook(after, always_call=True)
        self._undo.append(self._forward_hook.remove)

    def add_optimizer(
        self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer], *, cross: bool
    ) -> None:
        """Updates of ``optimizer`` are deferred from now on, if it may cross the barrier.

        ``kind`` is the class whose ``step()`` does them.
        """
        self._undo.extend(self._stepping.add(optimizer, kind, cross=cross))

    def take_over(self, take: Callable[[], Callable[[], None]], *, can_stop: bool) -> None:
        """``take`` makes gradients the session's; what it returns makes them the framework's.

        Called last of all. With ``can_stop``, both may happen several times.
        """
        self._changing.take_over(take, can_stop=can_stop)
        self.on_close(self._changing.give_back)

    def on_close(self, undo: Callable[[], None]) -> None:
        """Calls ``undo`` after every hook has been taken off."""
        self._undo.insert(0, undo)

    # -- forward -----------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """The root is called; its own hook calls this."""
        if not torch.is_grad_enabled():
            if not module.training:
                self._settle_all()
            return
        self._progress.check()
        self._rounds.complain_if_interrupted()
        self._streams.begin()
        if self._retuning is not None and self.plan is not None:
            self._retuning.before_forward(self._stepping.steps)
        if self._sync is not None:
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
        warm = WarmUp(
            self._backend,
            self._config,
            self._rounds.slots,
            cpu_load=self._meter.cpu_load(),
            retuning=self._retuning,
            knobs=self._backend.knobs | self._changing.knobs,
        )
        plan = warm.reduce(self._first_use.order(), find_unused=self._rounds.find_unused)
        config = self._config
        if self._retuning is not None:
            config = replace(config, policy=warm.setting.policy, order=warm.setting.order)
        if self._rounds.find_unused is None:
            self._rounds.find_unused = warm.unused
        self._settling = Settling(plan, self._progress, self._streams, self._meter)
        self._updater = Updater(self._progress, self._streams, self._meter)
        self._sending = Sending(plan, self._progress, self._updater, self._streams)
        self._carrier = self._sending.carrier = self._backend.carrier(
            plan,
            warm.packer,
            self._streams,
            Setting(warm.partition_bytes, warm.credit_bytes, config.policy, config.order),
            reduced=self._sending.reduced,
            failed=self._progress.fail,
            observers=self._observers,
        )
        self._progress.story = self._carrier.story
        self._rounds.activate(plan, self._settling, self._sending.submit)
        self._stepping.activate(self._settling, self._updater)
        gates = Gates()
        self._undo.extend(
            gates.rise(self.root, plan, self._first_use, self._settling, self._inside_compiled)
        )
        self._meter.active(plan, warm.partition_bytes, warm.credit_bytes)
        if self._retuning is not None:
            parts = Parts(plan, warm.packer, self._settling, gates, self._carrier)
            self._changing.activate(parts, warm.setting)
            self._retuning.activate(
                plan,
                self._settling,
                self._carrier,
                self._observers,
                self._drop_forward_hook,
            )
        self.plan = plan
        self._drop_forward_hook()
        if self._backend.rank == 0:
            log.info(
                "%d ranks, %r, partition %.0f KiB, credit %.0f KiB, policy %s, mode %s",
                self._backend.size,
                plan,
                warm.partition_bytes / 1024,
                warm.credit_bytes / 1024,
                config.policy,
                self.mode,
            )

    def _drop_forward_hook(self) -> None:
        """Only warm-up and observers need it; without bytesched its pickle cannot be loaded."""
        if not self._observers:
            self._forward_hook.remove()

    # -- from outside ------------------------------------------------------------------

    def backward_gradient(self, slot: Slot) -> None:
        """The gradient of ``slot`` is to be reduced; called in backward."""
        self._rounds.backward_gradient(slot)

    def complete_round(self) -> None:
        """Every parameter that got no gradient takes part with what it has, or with zeros."""
        self._rounds.complete()

    @property
    def rounds_finished(self) -> int:
        """How many rounds have been complete."""
        return self._rounds.finished

    def wait_reduced(self) -> None:
        """Returns when nothing is on the wire."""
        self._progress.check()
        if self.plan is not None:
            self._settling.wait_reduced()

    @property
    def mode(self) -> str:
        """The rung of the ladder: "cross" the barrier, schedule inside "backward" only, "plain"."""
        if self._stepping.off:
            return "plain"
        return "cross" if self._stepping.crosses else "backward"

    @property
    def observers(self) -> Observers:
        """What is told about this session, and may be told about what runs inside it."""
        return self._observers

    def flush(self) -> None:
        """Everything that was started is reduced, and everything armed is applied."""
        if not self._rounds.incomplete:
            self.wait_reduced()
        super().flush()

    def _stop_sending(self) -> None:
        self._carrier.close()

    def _give_back(self, slot: Slot, *, is_failed: bool) -> None:
        if not is_failed:
            self._rounds.give_back(slot)

    def stats(self) -> dict[str, int | float | str]:
        """Figures since the warm-up: those of `bytesched.figures.Figures`."""
        if self.plan is None:
            return self._figures(Traffic(), "leader")
        return self._figures(self._carrier.traffic, self._carrier.order)
