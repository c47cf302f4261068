"""A step of a sharded session: owned parameters are updated here, all others come."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from bytesched.round import UNTAKEN

from ..dependency.context import Context
from ..dependency.lazy import is_kept, is_seen
from ..dependency.synchronizing import Synchronizing
from ..layout.slots import Bundle, Job, Slot, Update
from ..proxies.lazy_grads import keep_apart
from ..routes.split.turns import Sent
from ..update.deferred import Deferred, Later
from ..update.frozen import snapshot, tensors_of
from ..update.pending_updates import PendingUpdates, is_of_arena
from ..update.stepping import why_now
from ..update.updater import Updater
from .full_gradients import FullGradients
from .optimizer_shards import StepTaken
from .sharding import Sharding
from .shards import OwnedShards
from .spreading import Spreading

__all__ = ["ShardedUpdates"]


class ShardedUpdates(PendingUpdates):
    """The steps of all optimizers of one model, whose parameters have owners.

    No step is ever the user's own over everything: it would make state of what others own.
    """

    def __init__(
        self,
        slots: list[Slot],
        synchronizing: Synchronizing,
        updater: Updater,
        context: Context,
        sharding: Sharding,
    ) -> None:
        super().__init__(slots, synchronizing, updater, context)
        self._spreading = sharding.spreading
        self._optimizer_shards = sharding.optimizer_shards
        self._full_gradients = sharding.full_gradients
        self._ownerships = sharding.ownerships
        self._lockstep = sharding.lockstep
        self._positions = {slot: position for position, slot in enumerate(slots)}
        self._received = _Received(sharding.ownerships)
        #: until ``step()`` is over: what it updates in this thread, and whether the rest may wait
        self._now: tuple[_Owned, list[Slot]] | None = None
        self._crosses = True

    def introduce(self, deferred: Deferred) -> None:
        super().introduce(deferred)
        for slot in self._slots.values():
            if (own := self._ownerships.own.get(slot)) is not None:
                deferred.know(own)
        self._optimizer_shards.introduce(deferred)

    def step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]]:
        whole_because = whole_because or why_now(deferred.optimizer)
        deferred.guard()
        self._lockstep.takes(self._optimizer_shards.number_of(deferred), self._taken_by(deferred))
        later: list[tuple[dict[str, Any], Slot]] = []
        now: list[Slot] = []
        foreign: list[Slot] = []
        groups: list[dict[str, Any]] = []
        for group in deferred.optimizer.param_groups:
            taken = snapshot(group)
            self._streams.lend(tensors_of(taken))
            eager: list[nn.Parameter] = []
            for parameter in group["params"]:
                slot = self._slots.get(id(parameter))
                if parameter.grad is None:
                    continue
                if slot is None:
                    eager.append(parameter)
                    continue
                if slot.alias.data_ptr() != parameter.data_ptr():
                    self._realias(slot, deferred)
                is_later = slot.state in UNTAKEN and is_of_arena(slot)
                own = self._ownerships.own.get(slot)
                if self._ownerships.foreign[slot]:
                    foreign.append(slot)
                if own is None:
                    continue
                if is_later and not whole_because:
                    later.append((taken, slot))
                else:
                    now.append(slot)
                    eager.append(parameter if own is slot else own.alias)
            groups.append({**group, "params": eager})
        self._wait_for(now)
        crossing = [slot for _, slot in later]
        owned = [*crossing, *now]
        update = None if whole_because else deferred.now()
        taken_step = self._optimizer_shards.step(deferred, len(owned), foreign)
        step = _Owned(self._spreading, self._full_gradients, taken_step, owned, update)
        step.note(crossing)
        self._now, self._crosses = (step, now), deferred.cross
        if now:
            step.begins()
        self._arm_all(_jobs(later, step, deferred), owned, foreign)
        return groups

    def stepped(self) -> None:
        super().stepped()
        if self._now is not None:
            step, now = self._now
            self._now = None
            if now:
                for part in filter(None, map(self._ownerships.parts.get, now)):
                    part.grad_from_arena()
                step.updated(now)
        if not self._crosses:
            self._synchronizing.synchronize_all()

    def _taken_by(self, deferred: Deferred) -> list[int]:
        """The positions of gradients that its step takes."""
        found = [
            self._slots.get(id(parameter))
            for group in deferred.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        slots = [slot for slot in found if slot is not None]
        self._full_gradients.refuse_spoiled(slots)
        return [self._positions[slot] for slot in slots]

    def _realias(self, slot: Slot, deferred: Deferred) -> None:
        """The parameter was given other memory."""
        slot.realias()
        deferred.know(slot)
        if (part := self._ownerships.parts.get(slot)) is not None:
            part.realias()
            deferred.know(part)

    def _wait_for(self, slots: list[Slot]) -> None:
        """Their gradients are there, and plain until ``step()`` is over."""
        chunks = {chunk for slot in slots for chunk in slot.chunks}
        self._progress.wait(lambda: not self._round.under_way.sums(chunks), "owned gradients")
        self._full_gradients.keep(slots)
        self._synchronizing.wait_slots(slots)
        with self._progress.lock:
            self._round.step(slots)
        for slot in slots:
            self._make_plain(slot)
            if (part := self._ownerships.parts.get(slot)) is not None:
                part.grad_from_parameter()

    def _arm_all(
        self, armed: dict[Bundle, list[Job]], owned: Sequence[Slot], foreign: Sequence[Slot]
    ) -> None:
        arriving: dict[Bundle, Job] = {}
        for slot in foreign:
            if slot.bundle not in arriving:
                arriving[slot.bundle] = Job(self._received, _NO_HYPERPARAMETERS)
            arriving[slot.bundle].slots.append(slot)
        for slot in foreign:
            # Its owner makes them.
            slot.changes.clear()
        self._full_gradients.spread(foreign)
        jobs = chain(chain.from_iterable(armed.values()), arriving.values())
        self._keep_mates(foreign, {slot for job in jobs for slot in job.slots})
        with self._progress.lock:
            expected = self._spreading.arm(owned, foreign)
            self._arm(armed, arriving)
        self._full_gradients.taken(owned, expected)
        self._spreading.expect(expected, Sent.PARAMETERS)

    def _keep_mates(self, foreign: Sequence[Slot], taken: set[Slot]) -> None:
        """Parameters come into the memory of gradients that this step has not taken, too."""
        left = [
            slot for slot in self._slots.values() if slot.state in UNTAKEN and slot not in taken
        ]
        if not left:
            return
        coming = set(self._spreading.foreign_chunks(foreign))
        for slot in left:
            is_known = slot.parameter.grad is slot.lazy or is_kept(slot) or is_seen(slot)
            if is_known and not coming.isdisjoint(slot.chunks):
                slot.lazy.synchronize()
                keep_apart(slot.lazy)


class _Owned:
    """What one step updates of this rank's parameters, until all of it is on its way to others.

    Args:
        taken: that step.
        update: of what may be updated later, if anything may.
    """

    def __init__(
        self,
        spreading: Spreading,
        full_gradients: FullGradients,
        taken: StepTaken,
        owned: Sequence[Slot],
        update: Later | None,
    ) -> None:
        self._spreading = spreading
        self._full_gradients = full_gradients
        self._taken = taken
        self._turn = spreading.turn + 1
        self._update = update
        #: guards what follows: of each chunk, how many of its parameters are not updated yet
        self._lock = threading.Lock()
        chunks = spreading.ownerships.chunks
        self._left = Counter([chunk.index for slot in owned for chunk in chunks[slot]])
        self._changes: dict[Slot, list[Callable[[list[torch.Tensor]], None]]] = {}

    def note(self, slots: Sequence[Slot]) -> None:
        """What was done to gradients so far comes before their update."""
        for slot in slots:
            self._changes[slot], slot.changes = slot.changes, []

    def begins(self) -> None:
        """Something is about to be updated."""
        self._taken.begins()

    def update(self, groups: list[tuple[dict[str, Any], list[Slot]]]) -> None:
        assert self._update is not None
        for _, some in groups:
            for slot in some:
                if changes := self._changes.pop(slot):
                    self._full_gradients.change(slot, changes)
        slots = [slot for _, some in groups for slot in some]
        self.begins()
        own = self._spreading.ownerships.own
        self._update.update([(taken, [own[slot] for slot in some]) for taken, some in groups])
        self.updated(slots)

    def updated(self, slots: Sequence[Slot]) -> None:
        """These are: what is complete is sent."""
        complete = []
        staged = self._spreading.stage(slots, self._turn)
        with self._lock:
            for chunk in staged:
                self._left[chunk.index] -= 1
                if not self._left[chunk.index]:
                    complete.append(chunk)
        for chunk in complete:
            self._spreading.send(chunk, self._turn)
        self._taken.ends(len(slots))


class _Received:
    """What comes from owners, put in place."""

    def __init__(self, ownerships: OwnedShards) -> None:
        self._ownerships = ownerships

    @torch.no_grad()
    def update(self, groups: list[tuple[dict[str, Any], list[Slot]]]) -> None:
        for _, slots in groups:
            for slot in slots:
                part = self._ownerships.parts.get(slot)
                if part is None:
                    slot.alias.copy_(slot.view)
                    continue
                for share in self._ownerships.foreign[slot]:
                    a, b = share.start_at, share.stop_at
                    part.of(slot.alias, a, b).copy_(part.of(slot.view, a, b))


_NO_HYPERPARAMETERS: dict[str, Any] = {}


def _jobs(
    later: Sequence[tuple[dict[str, Any], Slot]],
    step: Update,
    deferred: Deferred,
) -> dict[Bundle, list[Job]]:
    """By bundle, what is to be done when its gradients are there."""
    armed: dict[Bundle, list[Job]] = {}
    for taken, slot in later:
        jobs = armed.setdefault(slot.bundle, [])
        if not jobs or jobs[-1].hyperparameters is not taken:
            jobs.append(Job(step, taken, keeps=deferred.optimizer))
        jobs[-1].slots.append(slot)
    return armed
