"""Bundles: parameters that are updated together, when the first of them is used."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from .buckets import ALONE, Member, Sent

#: An optimizer call costs 0.2 to 0.5 ms, so a model has about a dozen.
_COUNT: Final = 12
#: the share of the first bundle in that of each other: forward begins with it
_FIRST_SHARE: Final = 0.25


class BundleState(Enum):
    """What becomes of an update."""

    FREE = "its parameters are ordinary ones"
    OWED = "a step() has been taken whose update is not made"
    RUNNING = "a thread makes the update"


class Slot:
    """One parameter of the model, and what stands for it in an update."""

    __slots__ = (
        "address",
        "alias",
        "awaits",
        "bundle",
        "first_address",
        "is_first_lent",
        "is_shared",
        "known_uses",
        "member",
        "name",
        "over_one_memory",
        "parameter",
        "parts",
    )

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        #: the same storage and version counter, with the gradient that the update reads: so an
        #: update never touches ``parameter.grad`` or its class
        self.alias = parameter
        #: where that gradient lies
        self.member: Member | None = None
        #: what its next update needs
        self.awaits: Sequence[Sent] | None = None
        self.bundle: Bundle
        #: how many tensors over a part of it updates have besides
        self.parts = 0
        #: this one and others whose parameters are over the same memory
        self.over_one_memory: list[Slot] = [self]
        #: how many tensors are over it while no others are
        self.known_uses = ALONE
        #: where it was when somebody asked whether others may have its memory, and the answer
        self.address = 0
        self.is_shared = False
        #: Torch did not allocate it, as that of arrays and files. Later that cannot be told from an
        #: array that was made of it for a moment.
        self.is_first_lent = not parameter.untyped_storage().resizable()
        self.first_address = parameter.data_ptr()

    def lies_at(self, address: int) -> None:
        """Its memory is there now."""
        parameter = self.parameter
        is_lent = self.is_first_lent
        if address != self.first_address:
            is_lent = not parameter.untyped_storage().resizable()
        self.address = address
        self.count_uses()
        # Memory that other processes have is a new one. All of a device's could be.
        self.is_shared = is_lent or (parameter.device.type == "cpu" and parameter.is_shared())

    def stand_for(self) -> bool:
        """There is an alias over the parameter's memory from now on; whether it is a new one."""
        parameter = self.parameter
        is_new = self.alias is parameter or self.alias.data_ptr() != parameter.data_ptr()
        if is_new:
            self.alias = nn.Parameter(parameter.detach(), parameter.requires_grad)
            self.count_uses()
        return is_new

    def take(self, member: Member) -> bool:
        """The next update reads the gradient of ``member``; whether there is a new alias."""
        parameter = self.parameter
        # Not `stand_for` at once: a call less for each gradient.
        is_new = self.alias is parameter or self.alias.data_ptr() != parameter.data_ptr()
        if is_new:
            self.stand_for()
        if is_new or member is not self.member:
            self.member, self.awaits = member, member.chunks
            self.alias.grad = member.view
        return is_new

    def forget(self) -> None:
        """Nothing is to be updated, and nothing of it stays here."""
        if self.alias is not self.parameter:
            # Whoever has the alias keeps neither this memory nor that of a bucket.
            self.alias.grad = None
            self.alias.data = self.alias.data.new_empty(0)
        self.alias, self.member, self.awaits = self.parameter, None, None
        self.count_uses()

    def count_uses(self) -> None:
        """How many tensors of the model and of updates are over this memory now."""
        for slot in self.over_one_memory:
            memory = _storage_of(slot.parameter)
            ours = [
                tensor
                for other in self.over_one_memory
                for tensor in dict.fromkeys((other.parameter, other.alias))
                if _storage_of(tensor) == memory
            ]
            slot.known_uses = ALONE - 1 + len(ours) + sum(o.parts for o in slot.over_one_memory)

    def __repr__(self) -> str:
        return f"<Slot {self.name!r}>"


#: Updates the slots of each group under its hyper-parameters, or puts in them what was elsewhere.
Update: TypeAlias = Callable[[Sequence[tuple[dict[str, Any], Sequence[Slot]]]], None]


@dataclass(frozen=True, eq=False)
class Debt:
    """An update that a ``step()`` has left: by what, and under which hyper-parameters."""

    by: Update
    hyperparameters: dict[str, Any]
    slots: list[Slot]
    #: in which they were left: by one step after the other, group by group
    number: int = field(default_factory=count().__next__)


@dataclass(eq=False)
class Bundle:
    """Parameters that are updated together."""

    number: int
    slots: list[Slot]
    state: BundleState = BundleState.FREE
    debts: list[Debt] = field(default_factory=list)
    #: what its debts need
    chunks: dict[Sent, None] = field(default_factory=dict)
    #: whether some of its parameters are over one memory
    is_tied: bool = False

    def split(self, here: Set[Sent]) -> tuple[list[Debt], list[Debt]]:
        """Its debts: of parameters whose chunks are all ``here``, and the others."""
        come = {
            slot
            for debt in self.debts
            for slot in debt.slots
            if slot.awaits is not None and here >= set(slot.awaits)
        }
        left = [debt for debt in self.debts if not come.issuperset(debt.slots)]
        if not left:
            return self.debts, []
        if self.is_tied:
            return [], self.debts
        taken = [_part(debt, come, is_in=True) for debt in self.debts]
        return (
            [debt for debt in taken if debt.slots],
            [_part(debt, come, is_in=False) for debt in left],
        )

    def __repr__(self) -> str:
        first = self.slots[0].name if self.slots else "nothing"
        size = len(self.slots)
        return f"<Bundle {self.number} from {first!r}, {size} parameters: {self.state.name}>"


def _part(debt: Debt, slots: Container[Slot], *, is_in: bool) -> Debt:
    return replace(debt, slots=[slot for slot in debt.slots if (slot in slots) is is_in])


def bundled(
    slots: Sequence[Slot], units: Iterable[Sequence[int]], least_bytes: int = 1
) -> list[Bundle]:
    """The bundles of ``slots``, in the order in which a forward pass uses them.

    Parameters over one memory are in one bundle: their updates keep the optimizer's order.

    Args:
        units: what it uses one after another, by index; no bundle begins within one.
        least_bytes: of a bundle: what comes in one chunk is updated in one call.
    """
    nbytes = sum(slot.parameter.nbytes for slot in slots)
    share = max(1.0, nbytes / (_COUNT - 1 + _FIRST_SHARE))
    first_bytes, other_bytes = max(_FIRST_SHARE * share, least_bytes), max(share, least_bytes)
    for slot in slots:
        slot.over_one_memory = [slot]
    bundles: list[Bundle] = []
    by_storage: dict[int, Bundle] = {}
    room = 0.0
    for unit in units:
        is_full = room <= 0
        for slot in (slots[index] for index in unit):
            storage = _storage_of(slot.parameter)
            shared = by_storage.get(storage)
            if shared is None:
                if is_full:
                    is_full = False
                    room = other_bytes if bundles else first_bytes
                    bundles.append(Bundle(len(bundles), []))
                shared = bundles[-1]
                by_storage[storage] = shared
                room -= slot.parameter.nbytes
            else:
                shared.is_tied = True
                tied = [other for other in shared.slots if _storage_of(other.parameter) == storage]
                for other in (*tied, slot):
                    other.over_one_memory = [*tied, slot]
                slot.count_uses()
            shared.slots.append(slot)
            slot.bundle = shared
    return bundles


def _storage_of(parameter: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        storage: Any = parameter.untyped_storage()
        # Empty ones have no address of their own.
        return int(storage.data_ptr() or id(parameter))
