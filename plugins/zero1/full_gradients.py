"""Gradients that a script reads whole, where each rank has but the sums that it owns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NoReturn, TypeAlias

import torch

from bytesched.errors import BytesschedError, PluginError, SchedulerTimeout
from bytesched.round import TAKEN, TO_COME, UNREADABLE, UNTAKEN, Memory, MemoryEvent, on_memory
from bytesched.task import CommTask

from ..dependency.context import Context
from ..dependency.lazy import give_back, is_known, is_left, withhold
from ..layout.memory import lies_over
from ..layout.packing import elements
from ..layout.plan import Plan, Share
from ..layout.slots import Slot
from .rank_answers import Reply
from .rank_calls import Ask, gathered, packed
from .shards import OwnedShards

__all__ = ["FullGradients"]

log = logging.getLogger("bytesched")

#: elements, and their sum before any change that was noted
_Sum: TypeAlias = tuple[Share, torch.Tensor]


class FullGradients:
    """Which gradients are whole here; the others are asked for when they are read.

    An owner answers with the sum as it was, before any change that was noted: the rank that asks
    makes them all. So no rank sees what the script of another one wrote.

    Args:
        ask: asks other ranks; in the user's thread, and of none before its first use.
    """

    def __init__(self, plan: Plan, context: Context, ownerships: OwnedShards, ask: Ask) -> None:
        self._plan = plan
        self._ownerships = ownerships
        self._progress = context.progress
        self._under_way = context.progress.round.under_way
        self._rank = context.backend.rank
        self._others = context.backend.size - 1
        self._timeout_s = context.backend.timeout_s
        self._ask = ask
        #: the first round was reduced as a whole
        self._round = 1
        #: of the round that ends: what backward is about to add to and no rank can have, and what
        #: is owned here and some rank may still read in a new round
        self._to_spoil: set[Slot] = set()
        self._askable: list[Slot] = []
        #: what backward adds to is whole on every rank, whatever each has read
        self.are_all_here = True
        self._is_logged = False
        #: guards what follows, and the memory of owned gradients while it is changed or sent
        self._lock = threading.Lock()
        #: owned ones as they were before this rank's script or step could write to them
        self._kept: dict[Slot, torch.Tensor] = {}
        #: owned ones of the last round: a rank that has not stepped yet may ask for them, and where
        #: nothing comes from it that this rank waits for, this one has not waited
        self._last: dict[Slot, torch.Tensor] = {}
        #: those that a step has taken without waiting for every rank
        self._unawaited: set[Slot] = set()

    def check(self) -> None:
        """A new backward pass begins. Raises PluginError if it adds to another one's gradient.

        What it adds to its own, which a step has taken, is spoiled: a script may still drop it.
        """
        slots = self._plan.slots
        gone = {
            id(s.lazy): s for s in slots if s.memory in UNREADABLE and lies_over(s.lazy, s.view)
        }
        self._to_spoil.clear()
        for slot in slots:
            added = gone.get(id(slot.parameter.grad))
            if added is not None and added is not slot:
                raise PluginError(
                    f"backward() adds to {slot.name}.grad, that of {added.name} in the last step, "
                    f"on rank {self._rank}, which does not have it: with shard=True, call "
                    "zero_grad() between step() and the next backward()"
                )
            if added is slot or (slot.memory is Memory.ALONE and is_left(slot)):
                self._to_spoil.add(slot)
        self._askable = [
            slot
            for slot in self._ownerships.own
            if slot.state in UNTAKEN or slot in self._unawaited
        ]

    def refuse_spoiled(self, slots: Iterable[Slot]) -> None:
        """A step takes the gradients of ``slots``. Raises PluginError if one is none."""
        for slot in slots:
            if (
                slot.memory is Memory.SPOILED
                and slot.parameter.grad is slot.lazy
                and lies_over(slot.lazy, slot.view)
            ):
                self._refusal(slot)()

    def begin_round(self) -> None:
        """Gradients of a new round take the place of those of the last one."""
        self.are_all_here = False
        on_memory(self._to_spoil, MemoryEvent.ROUND_ADDS)
        on_memory([s for s in self._plan.slots if s not in self._to_spoil], MemoryEvent.ROUND)
        for slot in self._plan.slots:
            # Of gradients that were dropped.
            slot.changes.clear()
        with self._lock:
            self._round += 1
            self._last = {slot: self._as_summed(slot) for slot in self._askable}
            self._kept.clear()
            self._unawaited.clear()
        with self._progress.lock:
            self._progress.notify()

    def came(self, slots: Iterable[Slot]) -> None:
        """Every rank has sent all ranks what it owns of ``slots``, to which backward adds."""
        self.are_all_here = True
        on_memory(slots, MemoryEvent.CAME)

    def spread(self, slots: Iterable[Slot]) -> None:
        """A step has parameters of ``slots`` sent here, in place of gradients."""
        on_memory(slots, MemoryEvent.OTHERS_STEP)

    def taken(self, owned: Sequence[Slot], coming: Iterable[CommTask]) -> None:
        """A step has updated ``owned``, and waits for these chunks of other ranks."""
        on_memory(owned, MemoryEvent.OWNER_STEP)
        if len({self._plan.owners[chunk.index] for chunk in coming}) < self._others:
            self._unawaited.update(owned)

    def withhold(self, slot: Slot) -> None:
        """The script has kept the gradient of ``slot``, whose memory is used anew."""
        if slot.memory in UNREADABLE:
            slot.lazy.synchronize = self._refusal(slot)

    def give_back(self, slot: Slot, *, in_child: bool) -> None:
        """The gradient of ``slot`` is an ordinary tensor, or one that raises, for good."""
        is_here = slot.memory is Memory.WHOLE or not self._ownerships.foreign[slot]
        if slot.memory not in UNREADABLE and is_here:
            give_back(slot)
        else:
            withhold(slot, self._refusal(slot), in_child=in_child)

    def bring(self) -> None:
        """What the script has of gradients that no step has taken is whole, with its changes."""
        for slot in self._plan.slots:
            if slot.memory in UNREADABLE or slot.state in TAKEN:
                continue
            if is_known(slot):
                slot.lazy.synchronize()

    # -- reads of this rank ------------------------------------------------------------

    def complete(self, slot: Slot) -> None:
        """``slot`` is read; what can be summed here is. Raises PluginError if it is too late."""
        if slot.memory in UNREADABLE:
            self._refusal(slot)()
        if slot.state in TO_COME:
            # A hook in backward sees what backward adds to, which came before it began.
            return
        if slot in self._ownerships.own:
            self.keep([slot])
        if self._ownerships.foreign[slot] and slot.memory is not Memory.WHOLE:
            others = [
                s
                for s in self._plan.slots
                if s.state in UNTAKEN and s.memory is Memory.SHARE and not s.is_apart
            ]
            # One that got no gradient in this round may have that of an earlier one.
            self._fetch([slot] if slot.is_apart else list(dict.fromkeys([*others, slot])))

    def keep(self, slots: Sequence[Slot]) -> None:
        """The script or a step in its thread may change what is owned here of these."""
        with self._lock, torch.no_grad():
            for slot in slots:
                self._keep(slot)

    def _keep(self, slot: Slot) -> None:
        if slot not in self._kept:
            self._kept[slot] = self._owned_sum(slot).clone()

    def summed(self, slot: Slot, start_at: int, stop_at: int) -> torch.Tensor:
        """These elements of ``slot``, which are owned here, as they were summed."""
        part = self._ownerships.parts.get(slot)
        before = 0 if part is None else part.share.start_at
        return self._as_summed(slot)[start_at - before : stop_at - before]

    def change(self, slot: Slot, changes: Sequence[Callable[[list[torch.Tensor]], None]]) -> None:
        """Makes changes that were noted of an owned gradient, for a step."""
        with self._lock, torch.no_grad():
            # A rank that asks for it may not have come to these.
            self._keep(slot)
            for change in changes:
                change([self._owned_sum(slot)])

    def _refusal(self, slot: Slot) -> Callable[[], NoReturn]:
        return partial(_refuse, slot.name, self._rank, slot.memory)

    @torch.no_grad()
    def _fetch(self, slots: Sequence[Slot]) -> None:
        if not self._is_logged and self._rank == 0:
            log.info(
                "the script reads gradients between backward() and step(): owners send them whole"
            )
        self._is_logged = True
        found = self._foreign_sums([s for s in slots if s.memory is not Memory.WHOLE])
        # Of these, other ranks own some elements, and this one may be about to sum its own.
        chunks = {chunk for slot in found for chunk in slot.chunks}
        self._progress.wait(lambda: not self._under_way.sums(chunks), "owned gradients")
        for slot, sums in found.items():
            for share, value in sums:
                _fill(slot.view, slot, share, value)
            part = self._ownerships.parts.get(slot)
            if part is not None:
                self.keep([slot])
                _fill(slot.view, slot, part.share, part.view)
            slot.changes.clear()
            on_memory([slot], MemoryEvent.CAME)

    @torch.no_grad()
    def assembled(self, slots: Sequence[Slot]) -> list[torch.Tensor]:
        """Whole gradients of this round, after all changes, in other memory. The user's thread."""
        found = []
        foreign = self._foreign_sums(slots)
        for slot in slots:
            gradient = slot.view.clone()
            sums = [] if slot.memory is Memory.WHOLE else foreign[slot]
            for share, value in sums:
                elements(gradient, slot.view, share.start_at, share.stop_at).copy_(value)
            for share in self._plan.shares(slot):
                part = elements(gradient, slot.view, share.start_at, share.stop_at)
                for change in slot.changes:
                    change([part])
            found.append(gradient)
        return found

    def _foreign_sums(self, slots: Sequence[Slot]) -> dict[Slot, list[_Sum]]:
        """What owners have summed of ``slots``: which elements, flat."""
        positions: dict[int, list[int]] = {}
        shares: dict[int, list[Share]] = {}
        wanted = set(slots)
        for position, slot in enumerate(self._plan.slots):
            for share in self._ownerships.foreign[slot] if slot in wanted else ():
                positions.setdefault(share.rank, []).append(position)
                shares.setdefault(share.rank, []).append(share)
        questions = {rank: (self._round, listed) for rank, listed in positions.items()}
        answers = gathered(
            self._progress,
            self._ask,
            "gradients",
            questions,
            "gradients",
            self._plan.slots[0].view.device,
        )
        found: dict[Slot, list[_Sum]] = {}
        for rank, listed in positions.items():
            for position, share, value in zip(listed, shares[rank], answers[rank], strict=True):
                found.setdefault(self._plan.slots[position], []).append((share, value))
        return found

    def _owned_sum(self, slot: Slot) -> torch.Tensor:
        """The memory of what this rank owns of it, flat."""
        part = self._ownerships.parts.get(slot)
        return elements(slot.view, slot.view, 0, slot.view.numel()) if part is None else part.view

    # -- for other ranks ---------------------------------------------------------------

    def answer(self, round_number: int, positions: Sequence[int]) -> Reply:
        """These gradients, as they were summed."""
        slots = [self._plan.slots[position] for position in positions]
        chunks = {chunk for slot in slots for chunk in slot.chunks}

        def are_summed() -> bool:
            if self._round > round_number:
                return True
            return self._round == round_number and not self._under_way.sums(chunks)

        def late() -> SchedulerTimeout:
            return SchedulerTimeout(
                f"gradients of round {round_number} are not there within {self._timeout_s:g} s, "
                "and another rank reads them",
                rank=self._rank,
            )

        return Reply(are_summed, partial(self._answer, round_number, slots), late)

    def _answer(self, round_number: int, slots: Sequence[Slot]) -> bytes:
        with self._lock:
            if self._round == round_number:
                return packed([self._as_summed(slot) for slot in slots])
            if self._round == round_number + 1 and all(slot in self._last for slot in slots):
                return packed([self._last[slot] for slot in slots])
        raise BytesschedError(
            f"rank {self._rank} is in round {self._round}, and gradients of round "
            f"{round_number} were asked for"
        )

    def _as_summed(self, slot: Slot) -> torch.Tensor:
        kept = self._kept.get(slot)
        return (self._owned_sum(slot) if kept is None else kept).clone()


def _fill(gradient: torch.Tensor, slot: Slot, share: Share, value: torch.Tensor) -> None:
    """``share`` of ``gradient`` becomes ``value``, after all changes that are noted."""
    target = elements(gradient, slot.view, share.start_at, share.stop_at)
    target.copy_(value)
    for change in slot.changes:
        change([target])


def _refuse(name: str, rank: int, memory: Memory) -> NoReturn:
    if memory is Memory.SPOILED:
        raise PluginError(
            f"backward() adds to {name}.grad, that of the last step, which not every rank has "
            f"(seen by rank {rank}): with shard=True, call zero_grad() between step() and the next "
            "backward(), or before anything uses these gradients"
        )
    if memory is Memory.GONE:
        raise PluginError(
            f"{name}.grad was read after step() on rank {rank}, which has only the parameter: "
            "with shard=True, read gradients between backward() and step()"
        )
    raise PluginError(
        f"{name}.grad is on other ranks, which rank {rank} can no longer ask: with shard=True, "
        "call bytesched.flush() earlier, between two backward passes"
    )
