"""One model in DDP whose gradients are planned: its parts, its hooks, and its life."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.config import Config
from bytesched.errors import PluginError, TransportError, UnusedParameterError
from bytesched.observe import Observers
from bytesched.tunable import Setting
from bytesched.urgency import URGENCY
from bytesched.values import size_text

from ..dependency.failures import Failures
from ..figures.unseen import ROUNDING, UNSEEN
from ..proxies.entries import guard_entries
from ..proxies.passes import IN_A_CONTEXT, are_in_a_context, watch_passes
from ..routes.carrier import Traffic
from ..stages import refuse_stage
from ..update.deferred import Deferred
from ..update.stepping import Stepping
from .attachment import Attachment, Give
from .bundles import Slot
from .clocks import Clock, DeviceClock, HostClock
from .cutting import Cutter
from .gates import Gates
from .guard import Guard, collectives_of
from .reducer import check_finalized, is_joining, reduced_by, refuse_effective_join
from .rounds import OpenOwners, Rounds
from .source import Phase
from .wire import Wire

__all__ = ["PlannedSession"]

log = logging.getLogger("bytesched")


class PlannedSession:
    """The life of one wrapped DDP.

    Args:
        root: the module whose call is a forward pass; not kept alive.
        ddp: the same, or the DDP that is compiled there.
        slots: all of its parameters, in registration order.
        cut: buckets into chunks.
        halves_bytes: of a chunk that goes in two halves, of two ranks; 0: none does.
        setting: the sizes in use, for figures.
        bucket_bytes: of the reducer that ``ddp`` gets in its next forward pass; 0: its own stays.
        is_finalized_ahead: the script is about to finalize a backward pass that is finalized.
        open_owners: opens what updates parameters, each a share; None: all ranks update all.
    """

    def __init__(
        self,
        root: nn.Module,
        ddp: DistributedDataParallel,
        slots: Sequence[Slot],
        config: Config,
        wire: Wire,
        observers: Observers,
        *,
        cut: Cutter,
        setting: Setting,
        halves_bytes: int = 0,
        bucket_bytes: int = 0,
        is_finalized_ahead: bool = False,
        open_owners: OpenOwners | None = None,
    ) -> None:
        self._root = weakref.ref(root)
        self._ddp = weakref.ref(ddp)
        self._name = type(ddp.module).__name__
        self._wire = wire
        self._slots = slots
        self._parameters = [slot.parameter for slot in slots]
        self._names = {id(slot.parameter): slot.name for slot in slots}
        self._by_name = {slot.name: slot.parameter for slot in slots}
        self._setting = setting
        self._bucket_bytes = bucket_bytes
        self.observers = observers
        self._failures = Failures(wire)
        device = slots[0].parameter.device
        clock: Clock = DeviceClock(device) if wire.has_streams else HostClock()
        self._guard = Guard(wire, clock)
        #: of DDP's own back end; None: not counted, or no turns are to come
        self._collectives = None
        if config.guard and open_owners is None:
            self._collectives = collectives_of(ddp, device)
        #: DDP is by itself, in a turn or until the guard looks again; collectives before the
        #: current backward pass
        self._is_away = False
        self._counted = 0
        self._rounds = Rounds(
            ddp,
            slots,
            config,
            wire,
            self._failures,
            observers,
            clock,
            cut=cut,
            halves_bytes=halves_bytes,
            setting=setting,
            learned=lambda: self._gates.are_learned(),
            began=self._began,
            open_owners=open_owners,
        )
        self.source, self._meter = self._rounds.source, self._rounds.meter
        self.owners = self._rounds.owners
        self._updates = self._rounds.updates
        self.source.is_finalized_ahead = is_finalized_ahead
        self._stepping = Stepping(self, self._meter, takes_gradients=self.owners is not None)
        self._gates = Gates(root, slots, self._updates, self, observers)
        #: buckets that were handed out before the current backward pass
        self._handed_out = 0
        #: an exception has ended a backward pass in the middle of a round
        self._is_interrupted = False
        #: a round was sent as those after it
        self._has_begun = False
        self._closed = self._is_off = False
        self._undo: list[Callable[[], None]] = []
        guard_entries()
        try:
            self._hook(ddp)
        except BaseException:
            self.close()
            raise

    def _hook(self, ddp: DistributedDataParallel) -> None:
        self._undo.append(watch_passes(self))
        self._attachment = Attachment(
            ddp,
            self.source,
            self._bucket_bytes,
            lambda: self._stand_aside("the script registers a hook of its own"),
        )
        self._undo.append(self._attachment.close)
        self._undo.append(self._stepping.close)

    def add_optimizer(
        self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer], *, cross: bool
    ) -> None:
        """Updates of ``optimizer`` are deferred from now on, if it may cross the barrier.

        ``kind`` is the class whose ``step()`` does them.
        """
        if self.owners is not None:
            self.owners.refuse_late()
        # The user may name the optimizer instead of the model, which is there as long as it is.
        self._stepping.add(optimizer, kind, self.root, cross=cross)

    def steps_whole(self, why: str) -> None:
        """No step can cross the barrier, for the reason ``why``, which ``stats()`` shows."""
        self._meter.whole_because = why

    def give(self, ddp: DistributedDataParallel, give: Give) -> None:
        """See `Attachment.give`."""
        self._attachment.give(ddp, give)
        self._undo.insert(0, self._attachment.take_off)

    # -- forward -----------------------------------------------------------------------

    def forward_begins(self, module: nn.Module) -> None:
        """See `Forward`."""
        if self._is_off and not self._comes_back():
            return
        self._failures.check()
        if self.source.phase is Phase.OPEN:
            self._complain_if_incomplete()
        if are_in_a_context():
            self._stand_aside(IN_A_CONTEXT)
            return
        if not self.source.handed_out:
            refuse_stage(module)
        ddp = self._ddp()
        refuse_effective_join(ddp)
        if self.owners is not None and ddp is not None:
            if is_joining(ddp):
                raise PluginError("shard=True: ranks under join() would miss what others own")
            is_rebuilding = self.source.is_early and self.source.rounds > 0
            if is_rebuilding or ddp.will_sync_module_buffers():
                self.owners.forward_begins()
        if self._attachment.is_renewal_due and self.source.phase is Phase.IDLE:
            # Here no backward pass of it is under way, or about to begin.
            self._rounds.land_all("forward")
            self._rounds.let_go_of_buckets()
            self._attachment.renew()
        if self._collectives is not None and self._guard.planned_forward(self.source.finished):
            self._go_away()
        self._meter.forward_begins()

    def _may_turn(self, ddp: DistributedDataParallel) -> bool:
        """Whether DDP may get another reducer in the forward pass that begins."""
        # That of a static graph sums nothing if its first pass is under no_sync().
        return self.source.phase is Phase.IDLE and (
            ddp.require_backward_grad_sync or not ddp.static_graph
        )

    def _go_away(self) -> None:
        """DDP is by itself, as the script made it, until the guard says something else."""
        ddp = self._ddp()
        if ddp is None or is_joining(ddp) or not self._may_turn(ddp):
            return
        self._rounds.land_all("forward")
        self._is_off = self._is_away = True
        self._gates.rest()
        self._rounds.let_go_of_buckets()
        self._attachment.leave()
        self._guard.plain_begins()

    def _comes_back(self) -> bool:
        """A forward pass of DDP by itself begins; whether the plan is in force again."""
        ddp, guard, root = self._ddp(), self._guard, self._root()
        if not self._is_away or ddp is None or root is None:
            return False
        if is_joining(ddp):
            self._stand_aside("join() is used")
            return False
        known = guard.decision
        try:
            guard.plain_forward()
        except TransportError as error:
            self._failures.raise_first(error)
        if guard.decision is not known and self._wire.rank == 0:
            log.info("%s", guard.decision)
        if not guard.is_planned_next or not self._may_turn(ddp):
            return False
        check_finalized(ddp)
        self._is_off = self._is_away = False
        self._rounds.begin_anew()
        self._attachment.come_back()
        self._gates.learn(root)
        guard.planned_begins(self.source.finished)
        return True

    def _complain_if_incomplete(self) -> None:
        """Where DDP raises that some parameters got no gradient: with their names, on all ranks."""
        ddp = self._ddp()
        if ddp is None or not ddp.require_backward_grad_sync:
            return
        here = {id(member.parameter) for member in self.source.members()}
        names = [self._names[id(p)] for p in reduced_by(ddp) if id(p) not in here]
        missing = [name for name in names if self._by_name[name].grad is None] or names
        error = UnusedParameterError(
            f"{len(missing)} parameters got no gradient on rank {self._wire.rank}: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. If that may happen, "
            "say find_unused_parameters=True to DistributedDataParallel"
        )
        self._failures.fail(error, is_raised=True)
        raise error

    def forward_ends(self) -> None:
        """See `Forward`."""
        self._meter.forward_ends()

    def inside_compiled(self) -> None:
        """See `Forward`."""
        if self._stepping.crosses:
            self._stepping.stop_crossing()
            log.warning(
                "torch.compile was applied after bytesched.wrap: scheduling inside backward, "
                "stepping whole; wrap the compiled model to cross the barrier"
            )

    # -- backward ----------------------------------------------------------------------

    def backward_begins(self) -> None:
        """See `Watcher`: everything from before has come."""
        self._handed_out = self.source.handed_out
        if self._is_away and self._collectives is not None:
            self._counted = self._collectives()
        if self._is_off or self._failures.error is not None or self.source.phase is Phase.OPEN:
            # Another pass may complete the round, whose buckets nothing writes again. An error is
            # raised where this model is used: the pass may be of another one.
            return
        self._rounds.land_all("backward")
        self.source.backward_begins(self._parameters)

    def backward_ends(self) -> None:
        """See `Watcher`."""
        if not self._is_away or self._collectives is None or self._collectives() == self._counted:
            return
        ddp = self._ddp()
        if ddp is not None and ddp.require_backward_grad_sync:
            self._guard.plain_round_ends()

    def backward_failed(self, error: BaseException) -> BaseException:
        """See `Watcher`."""
        if self._is_off or self.source.phase is Phase.IDLE:
            return error
        if self.source.handed_out == self._handed_out:
            # A pass beside the round.
            return error
        if self._failures.error is not None:
            # Whatever autograd has made of it on its way.
            self._failures.is_error_seen = True
            return self._failures.error
        ended = PluginError(
            f"an exception ended the last backward() on rank {self._wire.rank} when some of its "
            "gradients had been sent already; unwrap, and wrap again to go on"
        )
        self._is_interrupted = True
        self._failures.fail(ended, is_raised=True, cause=error)
        return error

    def _began(self, chunks: int, nbytes: int) -> None:
        if self._wire.rank == 0:
            if not self._has_begun:
                log.info(UNSEEN)
            are_ddps = not self._bucket_bytes and chunks == len(self.source.buckets)
            log.info(
                "%d ranks, %d tensors, %s in %d chunk%s, policy %s, mode %s%s",
                self._wire.size,
                len(self._slots),
                size_text(nbytes),
                chunks,
                "s" if chunks > 1 else "",
                self._setting.policy,
                self.mode,
                "" if are_ddps or self._wire.size == 2 else f", {ROUNDING}",
            )
        self._has_begun = True

    # -- steps -------------------------------------------------------------------------

    @property
    def names(self) -> Mapping[int, str]:
        """See `Steps`."""
        return self._names

    @property
    def are_off(self) -> bool:
        """See `Steps`."""
        return self._is_off

    def introduce(self, deferred: Deferred) -> None:
        """See `Steps`."""
        self._updates.introduce(deferred)

    def begin(self) -> None:
        """See `Steps`."""
        self._failures.check()

    def step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]] | None:
        """See `Steps`."""
        return self._updates.step(deferred, whole_because=whole_because)

    def stepped(self) -> None:
        """See `Steps`."""
        self._updates.stepped()

    def synchronize_all(self) -> None:
        """See `Steps`."""
        self._updates.apply_all()

    # -- life --------------------------------------------------------------------------

    @property
    def root(self) -> nn.Module | None:
        """The module whose call is a forward pass; None when nothing else refers to it any more."""
        return self._root()

    @property
    def error(self) -> BaseException | None:
        """The first error, which is final."""
        return self._failures.error

    @property
    def unseen_error(self) -> BaseException | None:
        """That error, if it was raised nowhere yet."""
        return None if self._failures.is_error_seen else self._failures.error

    @property
    def rounds_finished(self) -> int:
        """How many rounds have been complete."""
        return self.source.finished

    @property
    def is_measuring(self) -> bool:
        """Whether rounds are sent as those after them, so that they count in its figures."""
        return self._meter.is_measuring

    @property
    def mode(self) -> str:
        """The rung of the ladder: "cross" the barrier, schedule inside "backward" only, "plain".

        A turn without the plan changes nothing of it.
        """
        if self._is_off and not (self._is_away and not self._guard.is_aside):
            return "plain"
        return "cross" if self._stepping.crosses else "backward"

    def fail(self, error: BaseException) -> None:
        """Ends everything under way, on every rank; the user's thread raises ``error`` now."""
        self._failures.fail(error, is_raised=True)

    def raise_first(self, error: BaseException) -> NoReturn:
        """As `fail`; raises ``error``, or what came before it and has brought it about."""
        self._failures.raise_first(error)

    def flush(self) -> None:
        """Everything that was started is summed, and every step that was taken is applied."""
        if self._is_interrupted:
            # What was taken was applied before that pass began.
            return
        self._failures.check()
        if self.owners is not None:
            # Gradients come where all ranks read them.
            self._updates.apply_all()
        elif self.source.phase is Phase.IDLE:
            self._rounds.land_all("flush")

    def restore(self) -> None:
        """DDP does everything by itself from now on, on all ranks."""
        if self._is_interrupted or self.source.phase is Phase.OPEN:
            self.give_back()
            return
        self._failures.check()
        self._stand_aside()

    def _stand_aside(self, why: str = "") -> None:
        """The same; between two rounds. Idempotent."""
        if self._is_away:
            # DDP has no hook of ours, and what it has now is its own.
            self._is_away = False
            self._attachment.close()
            self._gates.close()
        elif self._is_off:
            return
        else:
            self._rounds.land_all("flush")
            self.give_back()
            if self.owners is not None:
                self.owners.restore()
        if why and self._wire.rank == 0:
            log.info("left to DDP from now on: %s", why)

    def give_back(self) -> None:
        """DDP has a reducer without our hook; nothing may be under way."""
        self._is_off, self._is_away = True, False
        self._attachment.close()
        self._gates.close()
        self._rounds.let_go_of_buckets()
        self._attachment.leave()

    def leave(self) -> None:
        """This rank takes no more steps."""
        self._failures.check()
        if self.owners is not None:
            self.owners.leave()

    def disown(self) -> None:
        """In a forked child: parameters and gradients are ordinary ones, as they are now.

        Those that were not there when the process was forked raise PluginError when they are read.
        """
        self._is_off, self._is_away = True, False
        self._rounds.sending.disown()
        self._updates.disown()
        if self.owners is not None:
            self.owners.disown()

    def close(self, *, release_parameters: bool = True) -> None:
        """Takes every hook off; does not flush. Idempotent.

        Parameters whose update is owed become ordinary ones, with the value they have, unless
        ``release_parameters`` is false: then reading them raises the first error.
        """
        if self._closed:
            return
        self._closed = True
        if self.owners is not None:
            self.owners.close()
        self._gates.close()
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception:
                log.exception("a part of this session could not be ended")
        if release_parameters:
            self._updates.forget()
            if self.error is not None and not self._is_off:
                # Not as the process ends: the script may go on with another session.
                self.give_back()
        self._is_off = True
        self._rounds.let_go_of_buckets()
        self._wire.close()
        self.observers.close()

    def stats(self) -> dict[str, int | float | str]:
        """Figures since the first rounds: those of `bytesched.figures.Figures`."""
        return {
            **self._guard.figures(),
            **self._meter.figures(Traffic()),
            "model": self._name,
            "mode": self.mode,
            "order": self._rounds.order,
            "levels": 1,
            "rank": self._wire.rank,
            "world_size": self._wire.size,
            **URGENCY.figures(),
            "turns": 0,
            "turn_wait_s": 0.0,
            "turns_ended": 0,
        }

    def __repr__(self) -> str:
        state = f"{self._rounds.sending!r}, {self._updates!r}"
        if self.error is not None:
            state = f"failed: {self.error}"
        return f"<bytesched rank {self._wire.rank} of {self._wire.size}: {state}>"
