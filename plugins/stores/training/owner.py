"""A store that updates, as the one owner of all parameters: gradients go there, values come.

The optimizer's state is there by chunk, and by parameter in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bytesched.errors import PluginError

from ...failures import Failures
from ...planned.buckets import Bucket, Chunk, Member
from ...planned.bundles import Bundle, Debt, Slot
from ...planned.updates import Parts, Updates
from ...update.deferred import Deferred
from ...update.surroundings import snapshot, unseen
from .wire import StoreWire


@dataclass(eq=False)
class Piece:
    """What one key of the store stands for."""

    chunk: Chunk
    #: parameters in it, each from one element to another in the order of its memory
    slices: list[tuple[Member, int, int]]
    key: str = ""


def pieces_of(bucket: Bucket) -> Iterator[Piece]:
    """One for each chunk."""
    stop = 0
    for chunk in bucket.chunks:
        start, stop = stop, stop + chunk.sent.numel()
        slices = []
        begin = 0
        for member in bucket.members:
            end = begin + member.view.numel()
            if max(start, begin) < min(stop, end):
                slices.append((member, max(start, begin) - begin, min(stop, end) - begin))
            begin = end
        yield Piece(chunk, slices)


def gathered_state(store: Any, pieces: Iterable[Piece]) -> dict[nn.Parameter, dict[str, Any]]:
    """The store's state of every parameter, as torch.optim has it."""
    entries: dict[nn.Parameter, dict[str, Any]] = {}
    for piece in pieces:
        size = piece.chunk.sent.numel()
        state = store.get_state(piece.key)
        del state["value"]
        at = 0
        for member, start, stop in piece.slices:
            entry = entries.setdefault(member.parameter, {})
            for name, tensor in state.items():
                if tensor.numel() != size or tensor.dim() == 0:
                    entry[name] = tensor.clone()
                    continue
                if name not in entry:
                    entry[name] = torch.empty_like(member.view, dtype=tensor.dtype)
                _flat(entry[name])[start:stop] = tensor[at : at + stop - start]
            at += stop - start
    return entries


def scatter_state(
    store: Any, pieces: Iterable[Piece], state: Mapping[Any, Mapping[str, Any]]
) -> None:
    """Gives the store the values of worker 0, and what there is of ``state``; collective."""
    for piece in pieces:
        entries = {"value": _joined(piece, [member.parameter for member, *_ in piece.slices])}
        leading = piece.slices[0][0]
        for name, first in state.get(leading.parameter, {}).items():
            first = torch.as_tensor(first)
            if first.dim() == 0 or first.numel() != leading.view.numel():
                entries[name] = first
            else:
                entries[name] = _joined(
                    piece, [state[member.parameter][name] for member, *_ in piece.slices]
                )
        store.set_state(piece.key, entries)


def _joined(piece: Piece, values: Iterable[Any]) -> torch.Tensor:
    """One for each parameter in a piece, in the order of its memory."""
    parts = []
    for (member, start, stop), value in zip(piece.slices, values, strict=True):
        given = torch.as_tensor(value).detach()
        same = torch.empty_like(member.view, dtype=given.dtype).copy_(given)
        parts.append(_flat(same)[start:stop])
    return torch.cat(parts)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def hyperparameters_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Those of all parameters; PluginError if its groups differ."""
    groups = [snapshot(group) for group in optimizer.param_groups]
    if any(group != groups[0] for group in groups):
        raise PluginError(
            "parameter groups with different settings: a store that updates has one for all"
        )
    # What a learning-rate scheduler keeps in the group is its own.
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in groups[0].items()
        if key != "initial_lr"
    }


def _nothing(*_: object, **__: object) -> None:
    """There is nothing to be done."""


class Owner:
    """What one session has in its store (see `terms.Owners`)."""

    measure = None
    # The store has all parameters, always, and nobody else has to be told of anything.
    deal = forward_begins = bring = refuse_late = restore = leave = disown = close = _nothing

    def __init__(self, wire: StoreWire, slots: Sequence[Slot], failures: Failures) -> None:
        self.store = wire.store
        self._wire = wire
        self._slots = slots
        self._failures = failures
        self._buckets: Sequence[Bucket] = ()
        #: what the store's keys stand for, once it has them
        self.pieces: list[Piece] = []
        self._hyperparameters: dict[str, Any] = {}
        #: of each parameter, when the store has the same value
        self._versions: list[int] = []
        #: buckets were pushed that no ``step()`` has taken
        self._is_untaken = False
        self._busy_before_ns = 0

    def open(self, buckets: Sequence[Bucket]) -> None:
        """Parameters are in the store from now on, chunk by chunk; collective."""
        self._buckets = tuple(buckets)
        for bucket in buckets:
            with unseen():
                for member in bucket.members:
                    member.view.copy_(member.parameter)
            for piece in pieces_of(bucket):
                piece.key = self._wire.name(piece.chunk.sent, piece.chunk.key)
                self.pieces.append(piece)
        self.note_versions()

    def note_versions(self, more: int = 0) -> None:
        """The store has what parameters will be when so many more writes are over."""
        self._versions = [slot.parameter._version + more for slot in self._slots]

    # -- gradients ---------------------------------------------------------------------

    def round_begins(self) -> None:
        """See `Owners`; raises PluginError for a second round in one step."""
        if self._is_untaken:
            self._failures.raise_first(
                PluginError(
                    "parameters got a second gradient before step(): the first has been sent; add "
                    "up the losses instead, or let the workers update"
                )
            )
        self._is_untaken = True
        self._busy_before_ns = self._wire.pulls_busy_ns
        versions = zip(self._slots, self._versions, strict=True)
        if any(slot.parameter._version != version for slot, version in versions):
            scatter_state(self.store, self.pieces, {})

    def start(self, bucket: Bucket) -> None:
        bucket.is_with_owners = True
        for chunk in bucket.chunks:
            self._wire.push(chunk.sent, chunk.key)

    @property
    def busy_ns(self) -> int:
        return self._wire.pulls_busy_ns - self._busy_before_ns

    # -- steps -------------------------------------------------------------------------

    def take(self) -> Iterator[Member]:
        """What a step takes: all parameters, or nothing if nothing was pushed."""
        if self._is_untaken:
            self._is_untaken = False
            for bucket in self._buckets:
                yield from bucket.members

    def ask(self, optimizer: torch.optim.Optimizer) -> None:
        """All values come, as ``step()`` of ``optimizer`` makes them."""
        hyperparameters = hyperparameters_of(optimizer)
        if hyperparameters != self._hyperparameters:
            self.store.set_hyperparameters(**hyperparameters)
            self._hyperparameters = hyperparameters
        for bucket in self._buckets:
            for chunk in bucket.chunks:
                chunk.work, chunk.landed_on = self._wire.ask(chunk.sent, chunk.key), None

    def let_go(self) -> None:
        self._buckets = ()
        self.pieces.clear()


def _put_values(groups: Sequence[tuple[dict[str, Any], Sequence[Slot]]]) -> None:
    """Puts what came into parameters (see `bundles.Update`)."""
    with unseen():
        for _, slots in groups:
            for slot in slots:
                assert slot.member is not None
                slot.alias.copy_(slot.member.view)


class StoreUpdates(Updates):
    """The steps of the one optimizer, which the store takes."""

    late_with_any_gradient = True
    takes_gradients = True

    def __init__(self, parts: Parts, owner: Owner) -> None:
        super().__init__(parts)
        self._owner = owner
        #: why parameters are to be here when ``step()`` is over; empty if they need not be
        self._whole_because = ""

    def step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]]:
        optimizer = deferred.optimizer
        deferred.guard()
        whole_because = whole_because or self._why_read_elsewhere(optimizer)
        if not deferred.cross:
            whole_because = whole_because or "this optimizer does not cross the barrier"
        self._whole_because = whole_because
        with self.lock:
            owed: dict[Bundle, list[Slot]] = {}
            for member in self._owner.take():
                slot = self._slots[id(member.parameter)]
                slot.stand_for()
                slot.member, slot.awaits = member, member.chunks
                slot.parameter.grad = None
                owed.setdefault(slot.bundle, []).append(slot)
            if owed:
                self._owner.ask(optimizer)
                # One for the step, and one for what comes.
                self._owner.note_versions(2)
            needed = self._owe([Debt(_put_values, {}, slots) for slots in owed.values()])
        if not whole_because:
            self._meter.stepped(self._sending.outstanding_bytes(needed))
        return [{**group, "params": []} for group in optimizer.param_groups]

    def stepped(self) -> None:
        if self._whole_because:
            self.apply_all("step")
            self._meter.stepped(0, self._whole_because)


def open_updates(wire: StoreWire, parts: Parts) -> tuple[Owner, Updates]:
    """What a session has in the store behind ``wire``, which updates."""
    owner = Owner(wire, parts.slots, parts.failures)
    return owner, StoreUpdates(parts, owner)
