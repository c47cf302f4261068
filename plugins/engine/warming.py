"""A session until its first round has been reduced: it learns, and nothing is sent early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns, process_time_ns

import torch

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.round import UNTAKEN
from bytesched.tunable import Setting

from ..dependency.context import Context, PlanParts
from ..dependency.gates import Gates
from ..dependency.synchronizing import Synchronizing
from ..layout.plan import Plan
from ..layout.slots import Slot
from ..moments.folding import Folding
from ..moments.updates import MomentUpdates
from ..proxies.first_use import FirstUse
from ..routes.carrier import Traffic
from ..routes.handover import Handover
from ..update.completions import Completions
from ..update.deferred import Deferred
from ..update.pending_updates import PendingUpdates
from ..update.separable import is_elementwise
from ..update.updater import Updater
from ..warmup.changing import Changing
from ..warmup.first_round import WarmedUp, WarmUp
from ..warmup.retuning import Decisions, Retuning
from ..zero1.checkpoint import HeldEntry
from ..zero1.sharded_updates import ShardedUpdates
from ..zero1.sharding import Dealing, Sharder, Sharding
from .running import Running

__all__ = ["WarmingUp"]


class WarmingUp:
    """The life of a session up to the end of its first round (see phase.Phase).

    Args:
        first_use: learns which parameters it uses first.
        decisions: of rank 0 about the setting, if it is tuned.
        folding: what brings gradients to where they are sent from, if anything does.
        find_unused: whether parameters may get no gradient; None if the first round is to show it.
        inside_compiled: called when a gate turns out to be inside compiled code.
        ended: called with the life that follows.
    """

    plan = None
    traffic = Traffic()
    order = "planned"

    def __init__(
        self,
        slots: Sequence[Slot],
        config: Config,
        context: Context,
        *,
        first_use: FirstUse,
        handover: Handover,
        decisions: Decisions | None,
        sharder: Sharder | None,
        folding: Folding | None,
        find_unused: bool | None,
        inside_compiled: Callable[[], None],
        ended: Callable[[Running], None],
    ) -> None:
        #: where it is not known, what is missing at the end of backward is unused
        self.find_unused = find_unused is not False
        self._slots = slots
        self._config = config
        self._context = context
        self._round = context.progress.round
        self._first_use = first_use
        self._handover = handover
        self._decisions = decisions
        self._sharder = sharder
        self._folding = folding
        self._asked_to_find = find_unused
        self._inside_compiled = inside_compiled
        self._ended = ended
        self._deferred: list[Deferred] = []
        self._began_ns = self._began_cpu_ns = 0

    def before_forward(self, steps: int) -> None:
        pass

    def forward_begins(self) -> None:
        self._began_ns, self._began_cpu_ns = perf_counter_ns(), process_time_ns()
        self._first_use.begin()

    def forward_ends(self) -> None:
        self._first_use.end()

    def begin_round(self, *, forward_seen: bool) -> None:
        self._round.begin()

    def gradient(self, slot: Slot) -> None:
        self._round.gradient(slot)

    def end_round(self) -> Running:
        """Reduces the round as a whole; collective."""
        self._first_use.close()
        cpu_ns = process_time_ns() - self._began_cpu_ns
        warm_up = WarmUp(
            self._context.backend,
            self._config,
            self._slots,
            cpu_load=cpu_ns / max(perf_counter_ns() - self._began_ns, 1),
            decisions=self._decisions,
            knobs=self._context.backend.knobs | self._handover.knobs,
        )
        try:
            warm = warm_up.reduce(self._first_use.order(), find_unused=self._asked_to_find)
        except BaseException as error:
            # The other ranks may wait for the rest of what they do together.
            progress = self._context.progress
            progress.fail(error)
            progress.is_error_seen = True
            raise
        running = self._running(warm)
        for deferred in self._deferred:
            running.introduce(deferred)
        running.hand_out()
        self._ended(running)
        return running

    def _running(self, warm: WarmedUp) -> Running:
        context, plan, setting = self._context, warm.plan, warm.decision.setting
        progress, streams, meter = context.progress, context.streams, context.meter
        self._round.cut(plan.chunks, plan.slots_of, plan.bundles, plan.bundles_of)
        updater = Updater(progress, streams, meter)
        completions = Completions(plan, progress, updater)
        carrier = context.backend.carrier(
            plan,
            warm.packer,
            streams,
            setting,
            reduced=completions.reduced,
            failed=progress.fail,
            observers=context.observers,
        )
        progress.story = carrier.story
        meter.active(plan.nbytes, len(plan.chunks), setting)
        sharding: Sharding | None = None
        if self._sharder is not None:
            sharding = Sharding(
                self._sharder,
                plan,
                warm.packer,
                context,
                setting,
                updater,
                Dealing(self._kinds(plan), self._may_cut(plan)),
                reduced=completions.reduced,
            )
        synchronizing = Synchronizing(plan, progress, streams, meter, sharding)
        used = [slot for slot in plan.slots if slot.state in UNTAKEN]
        gates = Gates(plan, used, self._first_use, synchronizing, self._inside_compiled)
        parts = PlanParts(plan, warm.packer, synchronizing, gates, carrier)
        if sharding is not None:
            pending_updates: PendingUpdates = ShardedUpdates(
                plan.slots, synchronizing, updater, context, sharding
            )
        elif self._folding is not None:
            pending_updates = MomentUpdates(
                plan.slots, synchronizing, updater, context, self._folding
            )
        else:
            pending_updates = PendingUpdates(plan.slots, synchronizing, updater, context)

        def traffic() -> Traffic:
            whole = carrier.traffic
            return whole if sharding is None else whole + sharding.traffic

        def cut(changed: Setting) -> None:
            parts.cut_whole(changed)
            meter.changed(len(plan.chunks), changed)

        retuning = None
        if self._decisions is not None:
            retuning = Retuning(
                self._decisions,
                warm.decision,
                Changing(plan.slots, self._handover, cut, setting),
                synchronizing,
                traffic,
                streams=streams,
            )
        return Running(
            parts,
            pending_updates,
            updater,
            context,
            setting=setting,
            find_unused=warm.unused if self._asked_to_find is None else self._asked_to_find,
            retuning=retuning,
            sharding=sharding,
            traffic=traffic,
        )

    def _kinds(self, plan: Plan) -> list[int]:
        """Which optimizer updates each parameter, by number; -1 if none does."""
        numbers = {
            key: number
            for number, deferred in enumerate(self._deferred)
            for key in deferred.parameter_ids()
        }
        return [numbers.get(id(slot.parameter), -1) for slot in plan.slots]

    def _may_cut(self, plan: Plan) -> list[bool]:
        """Whether any part of each parameter can be updated alone."""
        return [
            number >= 0
            and is_elementwise(self._deferred[number].kind)
            and slot.parameter.stride() == slot.view.stride()
            for slot, number in zip(plan.slots, self._kinds(plan), strict=True)
        ]

    def wait_reduced(self) -> None:
        pass

    def introduce(self, deferred: Deferred) -> None:
        self._deferred.append(deferred)

    def step(self, deferred: Deferred, *, whole_because: str) -> None:
        if self._folding is not None:
            self._folding.complete()

    def stepped(self) -> None:
        pass

    def synchronize_all(self) -> None:
        pass

    def state(self) -> str:
        return "warming up"

    def bring(self) -> None:
        pass

    def restore(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def held(self, optimizer: torch.optim.Optimizer) -> list[HeldEntry]:
        raise PluginError(
            "no rank owns anything before the first backward pass: load a checkpoint into the "
            "optimizer before it is wrapped, or save and load its shards after its first step()"
        )

    def disown(self) -> None:
        pass

    def close(self, *, release_parameters: bool) -> None:
        pass
