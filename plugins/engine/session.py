"""One wrapped model: its parts, and the order in which they come to life."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.observe import Observers
from bytesched.tunable import Setting, find_tuner
from bytesched.values import size_text

from ..dependency.context import Context
from ..figures.unseen import ROUNDING, UNSEEN
from ..layout.plan import Plan
from ..layout.slots import Slot
from ..planned.turns import open_turns
from ..proxies.entries import guard_entries
from ..proxies.hooks import StayingForwardHook, StayingHook
from ..proxies.passes import IN_A_CONTEXT, are_in_a_context
from ..routes.backend import Backend, from_leader
from ..routes.handover import Handover
from ..update.stepping import Stepping
from ..warmup.retuning import DECISION, Decisions
from .hooked import HookedModel
from .phase import Life
from .round_steps import RoundSteps
from .rounds import Rounds
from .running import Running
from .warming import WarmingUp

__all__ = ["Session"]

log = logging.getLogger("bytesched")


class Session(HookedModel):
    """The life of one wrapped model.

    The first round is the warm-up (WarmingUp): it is reduced as a whole, while the order of
    first use and the link are learned. From the second on (Running), chunks are submitted to the
    carrier as their gradients come, ``step()`` arms their updates (Arming, Updater), and
    parameters guard themselves (Synchronizing). Hooks stay the same (Rounds, Stepping).

    Args:
        root: the module whose call is a forward pass (the DDP object, if there is one).
        slots: the parameters that are reduced, in registration order, the same on all ranks.
        config: the settings; partition and credit are still 0 if they are to be chosen.
        backend: the ranks, and what they reduce with.
        sync: whether the backward pass of the forward pass that begins now is to be reduced;
        find_unused: True if parameters may get no gradient; None if the warm-up is to show it.
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
        guard_entries()
        self._sync = sync
        self._handover = Handover()
        decisions = None
        if config.tune and backend.knobs:
            tuner = find_tuner(config) if backend.rank == 0 else None
            device = slots[0].parameter.device
            decisions = Decisions(
                tuner, lambda values: from_leader(backend, values, device, DECISION)
            )
            self._undo.append(decisions.close)
        elif config.tune and backend.rank == 0:
            log.warning("tune is on, but sizes cannot change during training over %s", backend.wire)
        context = Context(backend, self._progress, self._streams, self._meter, observers)
        warming_up = WarmingUp(
            slots,
            config,
            context,
            first_use=self._first_use,
            handover=self._handover,
            decisions=decisions,
            find_unused=find_unused,
            inside_compiled=self._inside_compiled,
            ended=self._warmed_up,
        )
        self._rounds = Rounds(
            list(slots),
            context,
            self._handover,
            static_graph=static_graph,
            phase=warming_up,
        )
        if config.share:
            device = slots[0].parameter.device
            self._rounds.turns = open_turns(
                config.share,
                device,
                rank=backend.rank,
                size=backend.size,
                timeout_s=backend.timeout_s,
                look=self._progress.check,
            )
        self._stepping = Stepping(
            RoundSteps(self._rounds, self._handover, self._progress), self._meter
        )
        try:
            self._hook(root)
        except BaseException:
            self.close()
            raise

    def _hook(self, root: nn.Module) -> None:
        if self._sync is not None:
            for slot in self._rounds.slots:
                self._undo.append(self._rounds.hook(slot))
        if (turns := self._rounds.turns) is not None:
            turns.hook(root)
            self._undo.append(turns.close)
        before = StayingHook(self.before_forward, self._inside_compiled)
        self._undo.append(root.register_forward_pre_hook(before, prepend=True).remove)
        after = StayingForwardHook(self._after_forward)
        self._forward_hook = root.register_forward_hook(after, always_call=True)
        self._undo.append(self._forward_hook.remove)
        self._undo.append(self._stepping.close)

    def disown(self) -> None:
        self._handover.off = True
        super().disown()

    def add_optimizer(
        self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer], *, cross: bool
    ) -> None:
        """Updates of ``optimizer`` are deferred from now on, if it may cross the barrier.

        ``kind`` is the class whose ``step()`` does them.
        """
        # The user may name the optimizer instead of the model, which is there as long as it is.
        self._stepping.add(optimizer, kind, self.root, cross=cross)

    def steps_whole(self, why: str) -> None:
        """No step can cross the barrier, for the reason ``why``, which ``stats()`` shows."""
        self._meter.whole_because = why

    def take_over(self, take: Callable[[], Callable[[], None]], *, can_stop: bool) -> None:
        """``take`` makes gradients the session's; what it returns makes them the framework's.

        Called last of all. With ``can_stop``, both may happen several times.
        """
        self._handover.use(take, can_stop=can_stop)
        self.on_close(self._handover.give_back)

    def on_close(self, undo: Callable[[], None]) -> None:
        """Calls ``undo`` after every hook has been taken off."""
        self._undo.insert(0, undo)

    # -- forward -----------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """The root is called; its own hook calls this."""
        if self._is_disowned:
            return
        if torch.is_grad_enabled():
            self._before_training_forward()
        elif not module.training:
            self._life.synchronize_all()

    def _before_training_forward(self) -> None:
        self._progress.check()
        self._rounds.complain_if_interrupted()
        if are_in_a_context():
            self.raise_first(PluginError(f"this model cannot stay wrapped: {IN_A_CONTEXT}"))
        self._streams.begin()
        self._rounds.phase.before_forward(self._stepping.steps)
        if self._sync is not None:
            self._rounds.sync = self._sync()
            if self._rounds.sync:
                self._rounds.finish()
        self._rounds.forward_seen = True
        self._meter.forward_begins()
        self._rounds.phase.forward_begins()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._rounds.phase.forward_ends()
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

    def _warmed_up(self, running: Running) -> None:
        """The user's thread, at the end of the first round."""
        self._drop_forward_hook()
        if self._backend.rank == 0:
            log.info(UNSEEN)
            log.info("%s", _begun(self._backend.size, running.plan, running.setting, self.mode))

    def _drop_forward_hook(self) -> None:
        """Only warm-up and observers need it; without bytesched its pickle cannot be loaded."""
        if not self._observers:
            self._forward_hook.remove()

    # -- from outside ------------------------------------------------------------------

    @property
    def slots(self) -> Sequence[Slot]:
        """The parameters that are reduced, in registration order."""
        return self._rounds.slots

    @property
    def rounds_finished(self) -> int:
        """How many rounds have been complete."""
        return self._rounds.finished

    def wait_reduced(self) -> None:
        """Returns when nothing is on the wire."""
        self._progress.check()
        self._rounds.phase.wait_reduced()

    @property
    def mode(self) -> str:
        """The rung of the ladder: "cross" the barrier, schedule inside "backward" only, "plain"."""
        if self._handover.off:
            return "plain"
        return "cross" if self._stepping.crosses else "backward"

    def flush(self) -> None:
        """Everything that was started is reduced, and everything armed is applied."""
        if not self._rounds.incomplete:
            self.wait_reduced()
        super().flush()

    @property
    def _life(self) -> Life:
        return self._rounds.phase


def _nothing() -> None:
    pass


def _begun(ranks: int, plan: Plan, setting: Setting, mode: str) -> str:
    """What is sent from now on, in a line."""
    chunks = f"{len(plan.chunks)} chunk{'s' if len(plan.chunks) > 1 else ''}"
    rounding = f", {ROUNDING}" if ranks > 2 else ""
    return (
        f"{ranks} ranks, {len(plan.slots)} tensors, {size_text(plan.nbytes)} in {chunks} "
        f"of up to {size_text(setting.partition_bytes)}, "
        f"{size_text(setting.credit_bytes)} under way at a time, "
        f"policy {setting.policy}, mode {mode}{rounding}"
    )
