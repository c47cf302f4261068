"""The sharded update: each parameter is updated by its owner, which then sends it to all ranks.

In the first phase of a round every gradient is summed by its owner.
The second phase follows `step()`: what travels is the parameters (ZeRO, Rajbhandari et al., SC'20,
stage 1; their overlap with the next forward pass as in DeAR, Zhang et al., ICDCS'23).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch

from bytesched.round import UNREADABLE
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ..dependency.context import Context
from ..layout.packing import Packer
from ..layout.plan import Plan
from ..layout.slots import Slot
from ..proxies.lazy_grads import QueryHandler
from ..routes.carrier import Carrier, Traffic
from ..update.updater import Updater
from .checkpoint import HeldEntry
from .full_gradients import FullGradients
from .lockstep import Lockstep, Place
from .optimizer_shards import OptimizerShards
from .rank_answers import Answering, Reply
from .rank_calls import unpacked
from .shards import OwnedShards
from .spreading import SpreadCarrier, Spreading
from .unstepped import UnsteppedGradients

__all__ = ["Dealing", "Listener", "ShardedCarrier", "Sharder", "Sharding"]

log = logging.getLogger("bytesched")

_ENTRY: Final = "to shard the update"


class Listener(Protocol):
    """What a sharded carrier reports to. Threads of the carrier."""

    def spread(self, chunk: CommTask) -> None:
        """What was sent of ``chunk``, which is owned here, has left."""

    def gathered(self, chunk: CommTask) -> None:
        """What was expected of ``chunk`` is in the arena."""

    def asked(self, rank: int, question: bytes) -> None:
        """Another rank asks for something: `ShardedCarrier.answer` answers it, some time."""

    def assembled(self, slots: Sequence[Slot]) -> list[torch.Tensor]:
        """Whole gradients, after all changes that were noted. The user's thread."""

    def heard(self, rank: int, place: Place, is_last: bool) -> None:
        """Another rank has come to ``place``, perhaps its last one."""


class ShardedCarrier(Carrier, SpreadCarrier, Protocol):
    """Carries every chunk to its owner, and from there what the owner wants, when it wants it.

    A chunk is reported as reduced when its gradients have been summed here or have left. In between
    it answers for gradients, see `LazyGrad.queries`.
    """

    @property
    def queries(self) -> QueryHandler:
        """What answers."""

    def begin_round(self) -> None:
        """A new backward pass begins: what was asked of the last one is over."""

    def backward_ends(self) -> None:
        """Every gradient of the round is there, and may be asked about."""

    def end_round(self) -> None:
        """Every optimizer has stepped: nothing more is asked."""

    def lost(self) -> BaseException | None:
        """The error of something that is waited for and cannot come, if there is one."""

    def ask(self, questions: Mapping[int, bytes], *, task: str) -> Iterator[tuple[int, bytes]]:
        """What ranks answer to a question each. Not in the user's thread: it waits for messages."""

    def answer(self, rank: int, answer: bytes) -> None:
        """Sends ``rank`` what it has asked for first, of what was not answered. Any thread."""

    def announce(self, place: Place, is_last: bool) -> None:
        """Tells all other ranks where this one is, and whether it goes no further."""

    def leave(self, limit_s: float) -> list[int]:
        """Waits until all other ranks go no further.

        Returns those that have not said so within ``limit_s`` or are gone.
        """


class Sharder(Protocol):
    """Makes carriers for sharded updates."""

    def cut(
        self, plan: Plan, partition_bytes: int, kinds: Sequence[int], may_cut: Sequence[bool]
    ) -> None:
        """Cuts ``plan`` such that every chunk has one owner, with even bytes of each kind.

        No chunk has tensors of two kinds. Both are given by position, as is which tensors may have
        several owners.
        """

    def carrier(
        self,
        plan: Plan,
        packer: Packer,
        context: Context,
        setting: Setting,
        owners: Listener,
        *,
        reduced: Callable[[CommTask], None],
    ) -> ShardedCarrier:
        """Carries the chunks of ``plan``, which was cut here; collective."""


@dataclass(frozen=True)
class Dealing:
    """How the parameters of a plan may be dealt to owners; by position."""

    #: which optimizer updates each, by number; -1: none
    kinds: Sequence[int]
    #: whether any part of it can be updated alone
    may_cut: Sequence[bool]


class Sharding:
    """The carrier of a sharded session, and what comes and goes in its second phase.

    Made when the first round has been reduced, before any step; collective. It stands between the
    carrier, which reports to it, and everything that asks or tells other ranks something: so these
    are made first, with what they need, and the carrier then.

    Args:
        plan: is cut for owners here.
        packer: of that plan.
        reduced: called when the first phase of a chunk is over.
        updater: given the bundles of other owners that have come.
    """

    def __init__(
        self,
        sharder: Sharder,
        plan: Plan,
        packer: Packer,
        context: Context,
        setting: Setting,
        updater: Updater,
        dealing: Dealing,
        *,
        reduced: Callable[[CommTask], None],
    ) -> None:
        self._progress = context.progress
        self._streams = context.streams
        self._rank = context.backend.rank
        self._timeout_s = context.backend.timeout_s
        # What other ranks ask and announce is heard as soon as there is a carrier.
        self._answering = Answering(
            context.progress, self._timeout_s, find=self._find, answer=self._answer
        )
        self.lockstep = Lockstep(context.progress, self._rank, self._announce)
        here = torch.zeros(1, device=plan.slots[0].view.device)
        context.backend.wait(context.backend.sum(here, _ENTRY), task=_ENTRY)
        sharder.cut(plan, setting.partition_bytes, dealing.kinds, dealing.may_cut)
        packer.plan_cut()
        context.meter.changed(len(plan.chunks), setting)
        self.ownerships = OwnedShards(plan, self._rank)
        self.full_gradients = FullGradients(plan, context, self.ownerships, self._ask)
        self.optimizer_shards = OptimizerShards(
            plan, context, self.ownerships, self._ask, self.waits_for_ranks
        )
        # What other ranks ask and announce is answered as soon as there is a carrier.
        self._carrier = sharder.carrier(plan, packer, context, setting, self, reduced=reduced)
        context.progress.story = self._carrier.story
        context.progress.look = self._carrier.lost
        for slot in plan.slots:
            slot.queries = self._carrier.queries
        self.spreading = Spreading(plan, context.progress, self.ownerships, self._carrier, updater)
        self._unstepped = UnsteppedGradients(
            plan, context.progress, self.spreading, self.full_gradients, self.lockstep
        )

    # -- rounds ------------------------------------------------------------------------

    def carrier(self) -> Carrier:
        """What carries the round that begins."""
        self.full_gradients.check()
        self.lockstep.begins_round()
        return self._carrier

    def begin_round(self) -> None:
        """A new backward pass begins, and nothing of it is on the wire."""
        self.full_gradients.begin_round()
        self._carrier.begin_round()

    def waits_for_ranks(self) -> None:
        """A wait begins for what other ranks' steps send.

        A rank that asks for norms before its step gets no answer of one that waits for that step.
        """
        self._carrier.end_round()

    def complete(self, slot: Slot) -> None:
        """See `FullGradients.complete`."""
        self.full_gradients.complete(slot)

    def complete_kept(self, slot: Slot) -> None:
        """The script has kept the gradient of ``slot``, whose memory will be used anew."""
        if slot.memory not in UNREADABLE:
            self.full_gradients.complete(slot)
            slot.change()

    def withhold(self, slot: Slot) -> None:
        """The gradient that the script has kept has memory of its own now."""
        self.full_gradients.withhold(slot)

    def give_back(self, slot: Slot, *, in_child: bool) -> None:
        """See `FullGradients.give_back`."""
        self.full_gradients.give_back(slot, in_child=in_child)

    def bring(self) -> None:
        """See `FullGradients.bring`."""
        self.full_gradients.bring()

    def backward_ends(self) -> None:
        """Every gradient of the round is there."""
        self.lockstep.ends_backward()
        self._carrier.backward_ends()

    def end_round(self) -> None:
        """Every optimizer has stepped."""
        self._carrier.end_round()

    @property
    def traffic(self) -> Traffic:
        """What was carried in rounds."""
        return self._carrier.traffic

    def leave(self) -> None:
        """Other ranks hear that this one takes no more steps; it waits for none of them."""
        if self._progress.error is None:
            # This rank asks no norm any more: one that does looks at whole gradients.
            self._carrier.end_round()
            self.lockstep.ends()

    def close(self) -> None:
        """Ends what carries rounds, when no other rank needs anything of this one any more."""
        self.leave()
        if self._progress.error is None:
            left = self._carrier.leave(self._timeout_s)
            if left and self._progress.error is None:
                log.warning("rank %d ends before ranks %s", self._rank, left)
        self._answering.close()
        self.optimizer_shards.close()
        self._carrier.close()

    def restore(self) -> None:
        """Optimizers get the state that other ranks hold: from here on they are ordinary ones."""
        self.optimizer_shards.restore()

    def held(self, optimizer: torch.optim.Optimizer) -> list[HeldEntry]:
        """See `OptimizerShards.held`."""
        return self.optimizer_shards.held(optimizer)

    def forward_begins(self) -> None:
        """Backward will add to gradients that no step has taken: they become whole."""
        # A rank that asks for norms from here on needs no answer to go on.
        self._carrier.end_round()
        self._unstepped.bring()

    def spread(self, chunk: CommTask) -> None:
        self.spreading.spread(chunk)

    def gathered(self, chunk: CommTask) -> None:
        self.spreading.gathered(chunk)

    # -- other ranks -------------------------------------------------------------------

    def asked(self, rank: int, question: bytes) -> None:
        self._answering.asked(rank, question)

    def _find(self, question: bytes) -> Reply:
        kind, args = unpacked(question)
        replies: dict[str, Callable[..., Reply]] = {
            "state": self.optimizer_shards.answer,
            "gradients": self.full_gradients.answer,
        }
        reply = replies[kind](*args)

        def make() -> bytes:
            self._streams.settle()
            return reply.make()

        return replace(reply, make=make)

    def _answer(self, rank: int, answer: bytes) -> None:
        self._carrier.answer(rank, answer)

    def assembled(self, slots: Sequence[Slot]) -> list[torch.Tensor]:
        return self.full_gradients.assembled(slots)

    def _ask(self, questions: Mapping[int, bytes], task: str) -> Iterator[tuple[int, bytes]]:
        return self._carrier.ask(questions, task=task)

    def heard(self, rank: int, place: Place, is_last: bool) -> None:
        self.lockstep.heard(rank, place, is_last)

    def _announce(self, place: Place, is_last: bool) -> None:
        self._carrier.announce(place, is_last)
