"""A store that updates, as the one owner of all parameters: gradients go there, values come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bytesched.errors import PluginError

from ...failures import Failures
from ...planned.buckets import Bucket, Chunk, Member
from ...planned.bundles import Bundle, Debt, Slot
from ...planned.terms import OpenUpdates
from ...planned.updates import Parts, Updates
from ...update.deferred import Deferred
from ...update.surroundings import unseen
from .state import Piece, hyperparameters_of, pieces_of, scatter_state
from .wire import StoreWire

__all__ = ["Owner", "owning"]


def _nothing(*_: object, **__: object) -> None:
    """There is nothing to be done."""


class Owner:
    """What one session has in its store (see `terms.Owners`).

    Args:
        wire: with the store behind it.
        slots: all parameters.
    """

    questions = None
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

    def move_state(self, optimizer: torch.optim.Optimizer) -> None:
        """The store gets the state of ``optimizer``, and parameters; collective."""
        scatter_state(self.store, self.pieces, optimizer.state)
        optimizer.state.clear()

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
        """See `Owners`."""
        bucket.is_with_owners = True
        for chunk in bucket.chunks:
            self._wire.push(chunk.sent, chunk.key)

    @property
    def busy_ns(self) -> int:
        """See `Owners`."""
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
        for chunk in self._chunks():
            chunk.work, chunk.landed_on = self._wire.ask(chunk.sent, chunk.key), None

    def _chunks(self) -> Iterator[Chunk]:
        for bucket in self._buckets:
            yield from bucket.chunks

    def let_go(self) -> None:
        """See `Owners`."""
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
    """The steps of the one optimizer, which the store takes.

    Args:
        owner: of the same session.
    """

    late_with_any_gradient = True
    takes_gradients = True

    def __init__(self, parts: Parts, owner: Owner) -> None:
        super().__init__(parts)
        self._owner = owner
        #: why parameters are to be here when ``step()`` is over; empty if they need not be
        self._whole_because = ""

    def step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]]:
        """See `Updates.step`."""
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
        """See `Updates.stepped`."""
        if self._whole_because:
            self.apply_all("step")
            self._meter.stepped(0, self._whole_because)


def owning(wire: StoreWire) -> OpenUpdates:
    """Opens what a session has in the store behind ``wire``, which updates."""

    def opened(parts: Parts) -> tuple[Owner, Updates]:
        owner = Owner(wire, parts.slots, parts.failures)
        return owner, StoreUpdates(parts, owner)

    return opened
