"""Gradients that a script reads whole, where each rank has but the sums that it owns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic
from typing import NoReturn

import torch

from bytesched.errors import BytesschedError, PluginError, SchedulerTimeout
from bytesched.plugins.layout.memory import lies_over
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.session.asking import Ask, gathered, packed
from bytesched.plugins.session.phase import Context

__all__ = ["Wholes"]

log = logging.getLogger("bytesched")


class Wholes:
    """Which gradients are whole here; the others are asked for when they are read.

    An owner answers with the sum as it was, and how many of the changes that were noted are in it:
    the rank that asks makes the others. So no rank sees what the script of another one wrote.
    """

    def __init__(self, plan: Plan, context: Context) -> None:
        self._plan = plan
        self._progress = context.progress
        self._rank = context.backend.rank
        self._timeout_s = context.backend.timeout_s
        self.ask: Ask
        #: the first round was reduced as a whole
        self._round = 1
        self._whole: set[Slot] = set(plan.slots)
        #: foreign ones, in whose memory there are parameters since a step
        self._gone: set[Slot] = set()
        self._is_logged = False
        #: guards what follows, and the memory of owned gradients while it is changed or sent
        self._lock = threading.Lock()
        #: owned ones as they were before this rank's script could write to them
        self._kept: dict[Slot, torch.Tensor] = {}
        #: how many changes that were noted have been made, by a step
        self._made: dict[Slot, int] = {}

    def check(self) -> None:
        """A new backward pass begins. Raises PluginError if it adds to what is not here."""
        added = [s for s in self._gone if s.parameter.grad is s.lazy and lies_over(s.lazy, s.view)]
        if added:
            raise PluginError(
                f"backward() adds to {added[0].name}.grad of the last step on rank {self._rank}, "
                f"which does not have it: with shard=True, call zero_grad() between step() and the "
                "next backward()"
            )

    def begin_round(self) -> None:
        """Gradients of a new round take the place of those of the last one."""
        self._round += 1
        self._whole.clear()
        self._gone.clear()
        with self._lock:
            self._kept.clear()
            self._made.clear()

    def is_mine(self, slot: Slot) -> bool:
        """Whether this rank has the sum of ``slot``."""
        return self._plan.owner(slot) == self._rank

    @property
    def are_all_here(self) -> bool:
        """Whether every gradient of this round is whole on every rank."""
        return len(self._whole) == len(self._plan.slots)

    def all_came(self) -> None:
        """Every rank has sent all ranks what it owns."""
        self._whole.update(self._plan.slots)

    def spread(self, slots: Iterable[Slot]) -> None:
        """A step has parameters of ``slots`` sent here, in place of gradients."""
        self._gone.update(slots)

    def withhold(self, slot: Slot) -> None:
        """The script has kept the gradient of ``slot``, whose memory is used anew."""
        if slot in self._gone:
            slot.lazy.synchronize = partial(self._refuse, slot.name)

    # -- reads of this rank ------------------------------------------------------------

    def complete(self, slot: Slot) -> None:
        """``slot`` is read; what can be summed here is. Raises PluginError if it is too late."""
        if slot in self._gone:
            self._refuse(slot.name)
        if self.is_mine(slot):
            self.keep([slot])
        elif slot not in self._whole:
            others = [s for s in self._plan.slots if s.used and not s.apart]
            self._fetch([slot] if slot.apart else others)

    def keep(self, slots: Sequence[Slot]) -> None:
        """The script or a step in its thread may change these, which are owned here."""
        with self._lock, torch.no_grad():
            for slot in slots:
                if slot not in self._kept and slot not in self._made:
                    self._kept[slot] = slot.view.clone()

    def change(self, slot: Slot, changes: Sequence[Callable[[list[torch.Tensor]], None]]) -> None:
        """Makes changes that were noted of an owned gradient, for a step."""
        if changes:
            with self._lock, torch.no_grad():
                for change in changes:
                    change([slot.view])
                self._made[slot] = len(changes)

    def _refuse(self, name: str) -> NoReturn:
        raise PluginError(
            f"{name}.grad was read after step() on rank {self._rank}, which has its parameter "
            "alone: with shard=True, read gradients between backward() and step()"
        )

    @torch.no_grad()
    def _fetch(self, slots: Sequence[Slot]) -> None:
        if not self._is_logged and self._rank == 0:
            log.info(
                "the script reads gradients between backward() and step(): owners send them whole"
            )
        self._is_logged = True
        positions: dict[int, list[int]] = {}
        for position, slot in enumerate(self._plan.slots):
            owner = self._plan.owner(slot)
            if slot in slots and owner not in (None, self._rank) and slot not in self._whole:
                assert owner is not None
                positions.setdefault(owner, []).append(position)
        questions = {rank: (self._round, listed) for rank, listed in positions.items()}
        answers = gathered(self._progress, self.ask, "gradients", questions, "gradients")
        for rank, listed in positions.items():
            for position, (value, made) in zip(listed, answers[rank], strict=True):
                slot = self._plan.slots[position]
                slot.view.copy_(value)
                del slot.changes[:made]
                self._whole.add(slot)

    # -- for other ranks ---------------------------------------------------------------

    def answer(self, round_number: int, positions: Sequence[int]) -> bytes:
        """These gradients, and how many changes have been made. A thread of the carrier."""
        slots = [self._plan.slots[position] for position in positions]

        def are_summed() -> bool:
            return self._round >= round_number and not any(slot.sending for slot in slots)

        if not self._progress.done_by(monotonic() + self._timeout_s, are_summed):
            raise self._progress.error or SchedulerTimeout(
                f"gradients of round {round_number} are not there within {self._timeout_s:g} s, "
                "and another rank reads them",
                rank=self._rank,
            )
        if self._round > round_number:
            raise BytesschedError(
                f"rank {self._rank} is in round {self._round}, and gradients of round "
                f"{round_number} were asked for"
            )
        with self._lock:
            return packed(
                [
                    (self._kept.get(slot, slot.view).clone(), self._made.get(slot, 0))
                    for slot in slots
                ]
            )
