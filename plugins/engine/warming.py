"""A session until its first round has been reduced: it learns, and nothing is sent early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns, process_time_ns

from bytesched.config import Config
from bytesched.round import UNTAKEN
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ..dependency.context import Context
from ..dependency.gates import Gates
from ..dependency.synchronizing import Synchronizing
from ..layout.slots import Slot
from ..proxies.first_use import FirstUse
from ..routes.carrier import Traffic
from ..routes.handover import Handover
from ..update.deferred import Deferred
from ..update.pending_updates import PendingUpdates
from ..update.updater import Updater
from ..warmup.changing import Changing
from ..warmup.first_round import WarmedUp, WarmUp
from ..warmup.retuning import Decisions, Retuning
from .running import Running

__all__ = ["WarmingUp"]


class WarmingUp:
    """The life of a session up to the end of its first round (see phase.Phase).

    Args:
        first_use: learns which parameters it uses first.
        decisions: of rank 0 about the setting, if it is tuned.
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

        def reduced(chunk: CommTask) -> None:
            """A thread of the carrier."""
            with progress.lock:
                if chunk is plan.flags_chunk:
                    plan.flags_reduced = True
                if ready := self._round.summed(chunk):
                    updater.push(ready)
                progress.notify()

        carrier = context.backend.carrier(
            plan,
            warm.packer,
            streams,
            setting,
            reduced=reduced,
            failed=progress.fail,
            observers=context.observers,
        )
        progress.story = carrier.story
        meter.active(plan.nbytes, len(plan.chunks), setting)
        synchronizing = Synchronizing(plan, progress, streams, meter)
        used = [slot for slot in plan.slots if slot.state in UNTAKEN]
        gates = Gates(plan, used, self._first_use, synchronizing, self._inside_compiled)
        pending_updates = PendingUpdates(plan.slots, synchronizing, updater, context)

        def cut(changed: Setting) -> None:
            plan.cut(changed.partition_bytes)
            for part in (warm.packer, synchronizing, gates):
                part.plan_cut()
            carrier.change(changed)
            meter.changed(len(plan.chunks), changed)

        def land() -> None:
            synchronizing.wait_reduced()
            synchronizing.synchronize_all()

        retuning = None
        if self._decisions is not None:
            retuning = Retuning(
                self._decisions,
                warm.decision,
                Changing(plan.slots, self._handover, cut, setting),
                streams,
                land=land,
                traffic=lambda: carrier.traffic,
            )
        return Running(
            plan,
            gates,
            synchronizing,
            carrier,
            pending_updates,
            updater,
            context,
            setting=setting,
            find_unused=warm.unused if self._asked_to_find is None else self._asked_to_find,
            retuning=retuning,
        )

    def wait_reduced(self) -> None:
        pass

    def introduce(self, deferred: Deferred) -> None:
        self._deferred.append(deferred)

    def step(self, deferred: Deferred, *, whole_because: str) -> None:
        pass

    def stepped(self) -> None:
        pass

    def synchronize_all(self) -> None:
        pass

    def state(self) -> str:
        return "warming up"

    def disown(self) -> None:
        pass

    def close(self, *, release_parameters: bool) -> None:
        pass
