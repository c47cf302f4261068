"""A step of a sharded session: owned parameters are updated in ``step()``, all others come."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..planned.buckets import Member, make_changes
from ..planned.bundles import Bundle, Debt, Slot
from ..planned.updates import Parts, Updates
from ..planned.wire import HOST, Exchanging
from ..proxies.pending import PendingParameter, synchronize_now
from ..proxies.pending_grads import PendingGrad
from ..routes.group import Group
from ..update.deferred import Aliased, Deferred
from .owners import Owners
from .ownership import Part, Piece
from .sums import Place, Row


def open_owners(
    wire: Exchanging,
    group: Group,
    base: dist.ProcessGroup,
    reduced: Sequence[nn.Parameter],
    run_bytes: int,
    parts: Parts,
) -> tuple[Owners, Updates]:
    """The owners of a session, see `Owners`, and what updates for them."""
    owners = Owners(parts, wire, group, base, reduced, run_bytes=run_bytes)
    return owners, ShardedUpdates(parts, owners)


class ShardedUpdates(Updates):
    """The steps of all optimizers of one model, whose parameters have owners.

    No step is ever the user's own over everything: it would make state of what others own.
    """

    late_with_any_gradient = True
    takes_gradients = True

    def __init__(self, parts: Parts, owners: Owners) -> None:
        super().__init__(parts)
        self._owners = owners
        self._parts: dict[int, Part] = {}
        #: by the number of an optimizer, what it has stepped over last, and how that travels
        self._rows: dict[int, tuple[list[Slot], list[Row]]] = {}
        #: until ``step()`` is over, if it is the optimizer's own: what is to be sent, and why
        self._now: tuple[list[Row], str] | None = None

    def introduce(self, deferred: Deferred) -> None:
        super().introduce(deferred)
        self._owners.states.introduce(deferred)

    def step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]]:
        optimizer = deferred.optimizer
        deferred.guard()
        self._owners.deal()
        if not whole_because:
            whole_because = self._why_read_elsewhere(optimizer)
        if not deferred.cross:
            whole_because = whole_because or "this optimizer does not cross the barrier"
        groups, members = self._taken(optimizer)
        taken = {slot: None for _, some, _ in groups for slot in some}
        number = self._owners.states.keep(deferred)
        self._owners.steps(number, [slot.name for slot in taken], members)
        rows = self._rows_of(number, taken)
        with self.lock:
            # What the script has done to gradients is done where their sums are.
            sums = {member: self._owners.owned(member) for member in members}
            here = {member: memory for member, memory in sums.items() if memory is not None}
            make_changes(here, here.__getitem__)
            for member in members:
                member.changes, member.taken = [], True
            owned = [(group, list(self._owned(some, deferred))) for group, some, _ in groups]
            if whole_because:
                self._now = rows, whole_because
                self._owners.is_stepping = True
                return [
                    {**group, "params": [*others, *(one.alias for one in mine)]}
                    for (group, mine), (_, _, others) in zip(owned, groups, strict=True)
                ]
            try:
                self._update_owned(deferred.now(), owned, rows)
            except BaseException as error:
                # Others wait for what this rank would have sent.
                self._failures.fail(error, is_raised=True)
                raise
        self._meter.stepped(self._sending.outstanding_bytes(rows))
        return [{**group, "params": others} for group, _, others in groups]

    def _rows_of(self, number: int, taken: Container[Slot]) -> list[Row]:
        """What travels after a step of the optimizer ``number`` over ``taken``."""
        slots = [slot for slot in self._slots.values() if slot in taken]
        known, rows = self._rows.get(number, ([], []))
        if slots != known:
            runs: list[list[Slot]] = []
            for slot in slots:
                run = runs[-1] if runs else []
                is_full = sum(one.parameter.nbytes for one in run) >= self._owners.run_bytes
                if is_full or not run or run[0].parameter.dtype is not slot.parameter.dtype:
                    runs.append([slot])
                else:
                    run.append(slot)
            rows = [self._row(index, run) for index, run in enumerate(runs)]
            self._rows[number] = slots, rows
        return rows

    def _row(self, index: int, slots: Sequence[Slot]) -> Row:
        """Neighbours, all of one type."""
        first, ownership = slots[0], self._owners.ownership
        owned: list[list[Place]] = [[] for _ in range(self._owners.ranks)]
        for slot in slots:
            for piece in ownership.of(slot.parameter):
                memory = partial(self._memory, slot, piece)
                owned[piece.rank].append(Place(piece.numel, memory))
        name = first.name if len(slots) == 1 else f"{first.name}..{slots[-1].name}"
        empty = first.parameter.new_empty(0, requires_grad=False)
        return Row(index, name, empty, owned, ownership.rank, slots)

    def _memory(self, slot: Slot, piece: Piece) -> torch.Tensor:
        part = self._parts.get(id(slot.parameter))
        return slot.alias if part is None else part.of(slot.alias, piece)

    def _update_owned(
        self,
        by: Callable[[Sequence[tuple[dict[str, Any], Sequence[Aliased]]]], None],
        owned: Sequence[tuple[dict[str, Any], Sequence[Slot | Part]]],
        rows: Sequence[Row],
    ) -> None:
        """Updates what this rank owns, some rows at a time, which are sent at once."""
        for some in _portions(rows):
            here = {id(slot.parameter) for row in some for slot in row.slots}
            groups = [
                (group, slots)
                for group, mine in owned
                if (slots := [one for one in mine if id(one.parameter) in here])
            ]
            began_ns = perf_counter_ns()
            if groups:
                with self._sending.alone():
                    by(groups)
            self._meter.updated(some[0].name, len(some), began_ns)
            self._send(some)

    def _taken(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[list[tuple[dict[str, Any], list[Slot], list[nn.Parameter]]], list[Member]]:
        """Of each group, parameters of the model and others; and gradients that owners have."""
        groups = []
        members: list[Member] = []
        seen: set[Slot] = set()
        for group in optimizer.param_groups:
            mine: list[Slot] = []
            others: list[nn.Parameter] = []
            for parameter in group["params"]:
                if type(parameter) is PendingParameter:
                    synchronize_now(parameter)
                grad, slot = parameter.grad, self._slots.get(id(parameter))
                if grad is None or slot in seen:
                    continue
                if slot is None or not self._owners.is_owned(parameter):
                    others.append(parameter)
                    continue
                if type(grad) is PendingGrad:
                    if grad.sum_.parameter is parameter and not grad.sum_.taken:
                        members.append(grad.sum_)
                    else:
                        # All ranks do.
                        grad.sum_.settle()
                seen.add(slot)
                mine.append(slot)
            groups.append((group, mine, others))
        return groups, members

    def _owned(self, slots: Iterable[Slot], deferred: Deferred) -> Iterator[Slot | Part]:
        """What this rank updates of ``slots``, each with a gradient that is here."""
        ownership = self._owners.ownership
        for slot in slots:
            parameter = slot.parameter
            grad, piece = parameter.grad, ownership.own(parameter)
            if piece is None or grad is None:
                continue
            gradient = grad.sum_.view if type(grad) is PendingGrad else grad.detach()
            if ownership.is_cut(parameter):
                part = self._parts.get(id(parameter))
                if part is None:
                    part = self._parts[id(parameter)] = Part(slot, piece)
                if part.take(gradient):
                    deferred.know(part)
                yield part
                continue
            if slot.stand_for():
                deferred.know(slot)
            slot.alias.grad = gradient
            yield slot

    def stepped(self) -> None:
        """``step()`` is over: what it has updated as a whole goes to all."""
        now, self._now = self._now, None
        if now is not None:
            rows, whole_because = now
            self._owners.is_stepping = False
            with self.lock:
                self._send(rows)
            self.apply_all("step")
            self._meter.stepped(0, whole_because)

    def _send(self, rows: Iterable[Row]) -> None:
        """What this rank owns of ``rows`` goes to all, and what others own is owed."""
        owed: dict[Bundle, list[Slot]] = {}
        for row in rows:
            for slot in row.slots:
                if not self._owners.ownership.is_whole_here(slot.parameter):
                    slot.stand_for()
                    slot.awaits = (row,)
                    owed.setdefault(slot.bundle, []).append(slot)
                # No bucket has other uses than those that are counted.
                for one in (slot, self._parts.get(id(slot.parameter))):
                    if one is not None and one.alias is not slot.parameter:
                        one.alias.grad = None
            self._owners.send(row)
        # What puts them in place needs no hyper-parameters.
        self._owe([Debt(_put, {}, slots) for slots in owed.values()])


def _put(groups: Sequence[tuple[dict[str, Any], Sequence[Slot]]]) -> None:
    """Puts what came into parameters (see `bundles.Update`): of a row, all at once."""
    for row in {sent for _, slots in groups for slot in slots for sent in slot.awaits or ()}:
        assert isinstance(row, Row)
        row.put()
        for slot in row.slots:
            slot.awaits = ()
            if row.landed_on != HOST:
                # Other streams cannot wait for it any more, and what they queue comes after this.
                slot.bundle.chunks.pop(row, None)


def _portions(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Each twice as many as before: the link has something to do while the rest is updated."""
    start, count = 0, 1
    while start < len(rows):
        yield rows[start : start + count]
        start, count = start + count, 2 * count
