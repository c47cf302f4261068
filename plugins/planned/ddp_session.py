"""A model in DDP whose gradients are planned: DDP's own reducer, its turns, and its end."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.config import Config
from bytesched.errors import PluginError, TransportError, UnusedParameterError
from bytesched.tunable import Setting

from ..proxies.passes import IN_A_CONTEXT, are_in_a_context, refuse_stage
from .cutting import Cutter, cut_whole
from .guard import Guard, collectives_of
from .planning import PLANNED_AGAIN_IN
from .reducer import (
    Attachment,
    Give,
    check_finalized,
    is_joining,
    is_manual,
    keep_local,
    reduced_by,
    refuse_effective_join,
)
from .reducer_source import ReducerSource
from .session import PlannedSession
from .source import Phase
from .terms import Terms

__all__ = ["DdpSession"]

log = logging.getLogger("bytesched")

#: steps with a new reducer that show nothing: it gets the buckets that stay in the second one, and
#: they a plan
_RENEWED_STEPS: Final = 2 + PLANNED_AGAIN_IN


class DdpSession(PlannedSession):
    """The life of one wrapped DDP.

    Args:
        root: the module whose call is a forward pass; not kept alive.
        ddp: the same, or the DDP that is compiled there; ``slots`` are all of its parameters.
        cut: buckets into chunks.
        bucket_bytes: of the reducer that ``ddp`` gets in its next forward pass; 0: its own stays.
        is_finalized_ahead: the script is about to finalize a backward pass that is finalized.
    """

    source: ReducerSource

    def __init__(
        self,
        root: nn.Module,
        ddp: DistributedDataParallel,
        terms: Terms,
        *,
        cut: Cutter,
        bucket_bytes: int = 0,
        is_finalized_ahead: bool = False,
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._name = type(ddp.module).__name__
        self._by_name = {slot.name: slot.parameter for slot in terms.slots}
        self._cut = cut
        self._bucket_bytes = bucket_bytes
        #: of DDP's own back end; None: not counted, or no turns are to come
        self._collectives = None
        if terms.config.guard and terms.open_updates is None and _can_compare(terms.config):
            self._collectives = collectives_of(ddp, terms.slots[0].parameter.device)
        #: DDP is by itself, in a turn or until the guard looks again; collectives before the
        #: current backward pass
        self._is_away = False
        self._counted = 0
        super().__init__(
            root,
            terms,
            # DDP does not compress.
            can_stop=terms.config.compression == "none",
            changed_steps=_RENEWED_STEPS if bucket_bytes else PLANNED_AGAIN_IN,
        )
        self._guard = Guard(self._wire, self._clock)
        self.source.is_finalized_ahead = is_finalized_ahead

    def _make_source(self, divisor: int) -> ReducerSource:
        ddp = self._ddp()
        assert ddp is not None
        return ReducerSource(
            self,
            divisor,
            {id(slot.parameter): slot.name for slot in self.slots},
            holds_gradients=ddp.gradient_as_bucket_view,
            is_static=ddp.static_graph,
            is_batched=bool(getattr(ddp, "batched_grad_copy", False)),
            may_be_unused=ddp.find_unused_parameters,
            cut=self._cut,
            future=_future_of(self.slots[0].parameter.device),
            is_manual=partial(is_manual, self._ddp),
            keep_local=partial(keep_local, self._ddp),
        )

    def _hook(self, root: nn.Module) -> None:
        ddp = self._ddp()
        assert ddp is not None
        self._attachment = Attachment(
            ddp,
            self.source,
            self._bucket_bytes,
            lambda: self._stand_aside("the script registers a hook of its own"),
        )
        self._undo.append(self._attachment.close)

    def give(self, ddp: DistributedDataParallel, give: Give) -> None:
        """See `Attachment.give`."""
        self._attachment.give(ddp, give)
        self._undo.insert(0, self._attachment.take_off)

    # -- forward -----------------------------------------------------------------------

    def forward_begins(self, module: nn.Module) -> None:
        """See `PlannedSession`."""
        if self._is_off and not self._comes_back():
            return
        self._check_forward()
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
            self.land_all("forward")
            self.let_go_of_buckets()
            self._attachment.renew()
        self._tune()
        if self._is_off:
            return
        is_compared = self._collectives is not None
        if is_compared and self._guard.planned_forward(self.source.finished) and self._may_leave():
            self._go_away()
            self._guard.plain_begins()
        self._meter.forward_begins()

    def _may_turn(self, ddp: DistributedDataParallel) -> bool:
        """Whether DDP may get another reducer in the forward pass that begins."""
        # That of a static graph sums nothing if its first pass is under no_sync().
        return self.source.phase is Phase.IDLE and (
            ddp.require_backward_grad_sync or not ddp.static_graph
        )

    def _may_leave(self) -> bool:
        """Whether DDP may be by itself from the forward pass on that begins."""
        ddp = self._ddp()
        return ddp is not None and not is_joining(ddp) and self._may_turn(ddp)

    def _go_away(self) -> None:
        """DDP is by itself, as the script made it, until `_come_back`."""
        self.land_all("forward")
        self._is_off = self._is_away = True
        self._gates.rest()
        self.let_go_of_buckets()
        self._attachment.leave()

    def _comes_back(self) -> bool:
        """A forward pass of DDP by itself begins; whether the plan is in force again."""
        ddp, guard, root = self._ddp(), self._guard, self._root()
        if not self._is_away or ddp is None or root is None:
            return False
        if self._tuned is not None:
            self._failures.check()
            self._tune()
            return not self._is_away
        if is_joining(ddp):
            self._stand_aside("join() is used")
            return False
        known = guard.decision
        try:
            guard.plain_forward()
        except TransportError as error:
            self._failures.raise_first(error)
        if guard.decision is not known:
            if guard.is_aside:
                self._stepping.rest()
            if self._wire.rank == 0:
                log.info("%s", guard.decision)
        if not guard.is_planned_next or not self._may_turn(ddp):
            return False
        self._come_back(ddp, root)
        guard.planned_begins(self.source.finished)
        return True

    def _come_back(self, ddp: DistributedDataParallel, root: nn.Module) -> None:
        """The plan is in force from the forward pass on that begins."""
        check_finalized(ddp)
        self._is_off = self._is_away = False
        self._measure_anew()
        self._stepping.wake()
        self._attachment.come_back()
        self._gates.learn(root)

    # -- tuning ------------------------------------------------------------------------

    def _may_tune(self) -> bool:
        ddp = self._ddp()
        return ddp is not None and not is_joining(ddp)

    def _change(self, setting: Setting) -> bool:
        ddp, root = self._ddp(), self._root()
        if ddp is None or root is None or not self._may_turn(ddp):
            return False
        if not setting.enabled:
            if not self._is_away:
                self._go_away()
            return True
        partition_bytes = setting.partition_bytes
        is_resized = partition_bytes != self._setting.partition_bytes
        if is_resized:
            self.source.cut = partial(cut_whole, chunk_bytes=partition_bytes)
            if self._bucket_bytes:
                self._bucket_bytes = self._attachment.bucket_bytes = partition_bytes
        if self._is_away:
            self._come_back(ddp, root)
        elif is_resized:
            self.let_go_of_buckets()
            if self._bucket_bytes:
                self._attachment.renew()
                # It gets the buckets that stay in front of its second round.
                self.source.rounds = self.source.early_rounds - 1
        self._change_rounds(setting)
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

    # -- backward ----------------------------------------------------------------------

    def backward_begins(self) -> None:
        """See `Watcher`."""
        if self._is_away and self._collectives is not None:
            self._counted = self._collectives()
        super().backward_begins()

    def backward_ends(self) -> None:
        """See `Watcher`."""
        if name := self.source.added_to():
            self.raise_first(
                PluginError(
                    f"{name!r} got another gradient on rank {self._wire.rank} when its round was "
                    "over: several reentrant checkpoints use it, and DDP would add it up on each "
                    "rank alone. Say use_reentrant=False to checkpoint, or static_graph=True to DDP"
                )
            )
        if not self._is_away or self._collectives is None or self._collectives() == self._counted:
            return
        ddp = self._ddp()
        if ddp is not None and ddp.require_backward_grad_sync:
            self._guard.plain_round_ends()

    @property
    def _is_compared(self) -> bool:
        return self._collectives is not None or super()._is_compared

    def _rounds_alike(self, chunks: int) -> bool:
        is_ddps = not self._bucket_bytes and chunks == len(self.source.buckets)
        return is_ddps and self._wire.levels == 1

    # -- life --------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        """See `PlannedSession`. A turn without the plan changes nothing of it."""
        if self._is_away and self._tuned is None and not self._guard.is_aside:
            return "cross" if self._stepping.crosses else "backward"
        return super().mode

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
            self._take_gates_off()
        elif self._is_off:
            return
        else:
            self.land_all("flush")
            self.give_back()
            if self.owners is not None:
                self.owners.restore()
        self._stepping.rest()
        if why and self._wire.rank == 0:
            log.info("left to DDP from now on: %s", why)

    def give_back(self) -> None:
        """DDP has a reducer without our hook; nothing may be under way."""
        self._is_off, self._is_away = True, False
        self._attachment.close()
        self._take_gates_off()
        self.let_go_of_buckets()
        self._attachment.leave()

    def disown(self) -> None:
        """See `PlannedSession`."""
        self._is_away = False
        super().disown()

    def stats(self) -> dict[str, int | float | str]:
        """See `PlannedSession`."""
        return {**self._guard.figures(), **super().stats()}


def _can_compare(config: Config) -> bool:
    """Whether plain DDP has the same numbers and takes turns on a device as well, and is compared
    by nobody else.
    """
    return config.compression == "none" and not config.share and not config.tune


def _future_of(device: torch.device) -> Callable[[], torch.futures.Future[torch.Tensor]]:
    if device.type == "cpu":
        return torch.futures.Future
    return lambda: torch.futures.Future(devices=[device])
