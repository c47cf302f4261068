"""A model whose gradients are folded into moments, which are planned in their place.

Every update is owed, and takes moments as they are summed.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import nn

from bytesched.errors import PluginError

from ..planned.buckets import Bucket, Member
from ..planned.bundles import Bundle, Debt, Slot, Update
from ..planned.entries import Entry
from ..planned.hook_source import HookSource
from ..planned.hooked_session import HookedSession
from ..planned.reducer import is_joining
from ..planned.terms import Terms
from ..planned.updates import Parts, Updates
from ..update.deferred import Deferred
from ..update.optimizer_state import GuardedState
from ..update.surroundings import snapshot, unseen
from .folding import Accumulation, Folding, decays_apart
from .slots import MomentSlot


class MomentUpdates(Updates):
    """The steps of the optimizer whose moments travel."""

    takes_gradients = True

    def __init__(self, parts: Parts, folding: Folding) -> None:
        super().__init__(parts)
        self._folding = folding

    def step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]]:
        """See `Updates.step`."""
        optimizer = deferred.optimizer
        if hasattr(optimizer, "grad_scale"):
            raise PluginError(
                "a fused step under GradScaler looks for infinite gradients, and with "
                "accumulate='adama' there are none to look at: train in bfloat16, or without it"
            )
        nothing = [{**group, "params": []} for group in optimizer.param_groups]
        if not self._folding.complete():
            return nothing
        deferred.guard()
        debts = self._all_owed(optimizer)
        with self.lock:
            needed = self._owe(debts)
        self._meter.stepped(self._sending.outstanding_bytes(needed), whole_because)
        if whole_because or not deferred.cross:
            self.apply_all("step")
        return nothing

    def _all_owed(self, optimizer: torch.optim.Optimizer) -> list[Debt]:
        debts: list[Debt] = []
        update = _adam(optimizer.state)
        #: a group may name a parameter twice
        seen: set[Slot] = set()
        for group in optimizer.param_groups:
            taken = snapshot(group)
            if not decays_apart(optimizer, group):
                # The gradients have decayed.
                taken["weight_decay"] = 0.0
            owed: dict[Bundle, list[Slot]] = {}
            for parameter in group["params"]:
                slot = self._slots.get(id(parameter))
                if slot is not None and slot not in seen:
                    seen.add(slot)
                    slot.stand_for()
                    owed.setdefault(slot.bundle, []).append(slot)
            debts += [Debt(update, taken, slots) for slots in owed.values()]
        return debts

    def stepped(self) -> None:
        """See `Updates.stepped`."""
        for slot in self._slots.values():
            assert isinstance(slot, MomentSlot)
            slot.withhold()


def _adam(state: Any) -> Update:
    """Adam's update from its moments (Kingma and Ba 2015; AdamW: Loshchilov and Hutter 2019)."""
    assert isinstance(state, GuardedState)

    def update(groups: Sequence[tuple[dict[str, Any], Sequence[Slot]]]) -> None:
        with unseen():
            for taken, slots in groups:
                for slot in slots:
                    assert isinstance(slot, MomentSlot)
                    _update(slot, state.raw(slot.parameter), taken)

    return update


def _update(slot: MomentSlot, entry: dict[str, Any], taken: dict[str, Any]) -> None:
    # They may have moved since the first gradient was folded.
    slot.show(entry)
    entry["step"] += 1
    step = float(entry["step"])
    rate = float(taken["lr"])
    first, second = map(float, taken["betas"])
    square = slot.square
    if taken["amsgrad"]:
        largest = entry.setdefault("max_exp_avg_sq", torch.zeros_like(square))
        square = torch.maximum(largest, square, out=largest)
    parameter = slot.alias
    if taken["weight_decay"]:
        parameter.mul_(1 - rate * float(taken["weight_decay"]))
    spread = (square.sqrt() / sqrt(1 - second**step)).add_(float(taken["eps"]))
    parameter.addcdiv_(slot.mean, spread, value=-rate / (1 - first**step))


class MomentEntry(Entry):
    """One parameter, whose moments are both halves of what it has in a bucket."""

    __slots__ = ("_member",)

    slot: MomentSlot
    _member: Member

    @property
    def numel(self) -> int:
        """See `Entry`."""
        return 2 * super().numel

    def let_go(self) -> None:
        """See `Entry`: moments stay until they are laid out anew."""

    def lay_out(self, member: Member, memory: torch.Tensor) -> None:
        """See `Entry`."""
        self._member = member
        self.slot.lay_out(memory)

    def fill(self, scale: float) -> bool:
        """See `Entry`: gradients were scaled as they were folded."""
        self.slot.awaits = self._member.chunks
        return True


class MomentSource(HookSource):
    """The moments of one model's parameters, after each mini-batch."""

    entry_kind: ClassVar[type[Entry]] = MomentEntry

    def _hand_out(self, bucket: Bucket, left: Container[int] = ()) -> bool:
        """See `Source`: what waits for sums is ``step()`` alone."""
        for member in bucket.members:
            entry = self._by_id[id(member.parameter)]
            assert isinstance(entry, MomentEntry)
            entry.slot.release()
        return True


class FoldedSession(HookedSession):
    """The life of one wrapped model, of which the last backward pass of a mini-batch is a round."""

    source_kind = MomentSource

    def __init__(self, root: nn.Module, terms: Terms, accumulation: Accumulation) -> None:
        moments = [slot for slot in terms.slots if isinstance(slot, MomentSlot)]
        self._moments = moments
        #: those whose gradient is refused, but not while a backward pass runs
        self._withheld: list[MomentSlot] = []

        def open_updates(parts: Parts) -> tuple[None, MomentUpdates]:
            self._folding = Folding(
                accumulation, moments, parts.failures, rank=parts.rank, ranks=terms.wire.size
            )
            return None, MomentUpdates(parts, self._folding)

        super().__init__(
            root,
            # Gradients are divided as they are folded.
            replace(terms, divisor=1, carrier="", open_updates=open_updates),
            sync=lambda: self._folding.is_last(),
            find_unused=False,
        )

    def forward_begins(self, module: Any) -> None:
        """See `PlannedSession`."""
        if not self._is_off and is_joining(module):
            raise PluginError(
                "DistributedDataParallel.join() shadows DDP's own all-reduces, but not those of "
                "moments (accumulate='adama'): pad the shorter ranks' data, or unwrap the "
                "optimizer first"
            )
        super().forward_begins(module)

    def _hook(self, root: nn.Module) -> None:
        self._undo.append(self._folding.close)
        # Before those of the source, which send what was folded.
        self._folding.hook()
        super()._hook(root)

    def add_optimizer(
        self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer], *, cross: bool
    ) -> None:
        """See `PlannedSession`."""
        self._folding.check(optimizer)
        super().add_optimizer(optimizer, kind, cross=cross)

    def backward_begins(self) -> None:
        """See `Watcher`."""
        # Autograd would add to what cannot be read.
        self._withheld = [slot for slot in self._moments if slot.withhold()]
        super().backward_begins()

    def backward_ends(self) -> None:
        """See `Watcher`."""
        super().backward_ends()
        self._release_again()

    def backward_failed(self, error: BaseException) -> BaseException:
        """See `Watcher`."""
        self._release_again()
        return super().backward_failed(error)

    def _release_again(self) -> None:
        """Of another model, that pass, or one too many."""
        for slot in self._withheld:
            if slot.parameter.grad is None:
                slot.release()
        self._withheld = []

    def disown(self) -> None:
        """See `PlannedSession`."""
        self._folding.close()
        super().disown()
