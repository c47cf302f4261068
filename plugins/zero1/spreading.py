"""The second phase of a sharded session: what owners send, and what is done when it has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from bytesched.task import CommTask

from ..dependency.progress import Progress
from ..layout.packing import elements
from ..layout.plan import Plan
from ..layout.slots import Slice, Slot
from ..update.updater import Updater
from .shards import OwnedShards

__all__ = ["SpreadCarrier", "Spreading"]


class SpreadCarrier(Protocol):
    """Carries chunks from their owners to all other ranks."""

    def arm(self, turn: int, leaving: Sequence[CommTask], coming: Sequence[CommTask]) -> None:
        """What this rank sends next may be of ``turn``: ``leaving``, while ``coming`` come."""

    def expect(self, chunks: Iterable[CommTask]) -> None:
        """The owners of ``chunks`` send something of each."""

    def stage(self, chunk: CommTask) -> torch.Tensor:
        """Memory in the layout of ``chunk``, free to be written; waits until it is."""

    def spread(self, chunk: CommTask, turn: int) -> None:
        """Sends what was staged of ``chunk`` to all other ranks; lower turns first, from 1 on."""


class Spreading:
    """Which chunks owners have still to send, and who waits for them."""

    def __init__(
        self,
        plan: Plan,
        progress: Progress,
        ownerships: OwnedShards,
        carrier: SpreadCarrier,
        updater: Updater,
    ) -> None:
        self.ownerships = ownerships
        self._plan = plan
        self._progress = progress
        self._carrier = carrier
        self._updater = updater
        self._round = progress.round
        #: of what was armed last
        self.turn = 0

    def owned_chunks(self, slots: Iterable[Slot]) -> list[CommTask]:
        """The chunks of ``slots`` that are updated here."""
        return [c for c in _chunks_of(slots) if self.ownerships.is_mine(c)]

    def foreign_chunks(self, slots: Iterable[Slot]) -> list[CommTask]:
        """Those that are updated elsewhere."""
        return [c for c in _chunks_of(slots) if not self.ownerships.is_mine(c)]

    def arm(self, owned: Sequence[Slot], foreign: Sequence[Slot]) -> list[CommTask]:
        """Something of ``owned`` is sent and of ``foreign`` comes; returns what is to be expected.

        Some may be in both.

        It has the turn after that of the last one.

        Called with the lock of the session's progress held.
        """
        self.turn += 1
        expected, leaving = self.foreign_chunks(foreign), self.owned_chunks(owned)
        self._carrier.arm(self.turn, leaving, expected)
        self._round.under_way.expect(expected, leaving)
        return expected

    def expect(self, chunks: Sequence[CommTask]) -> None:
        """The owners of ``chunks`` send their parameters, or their gradients."""
        self._carrier.expect(chunks)

    @torch.no_grad()
    def stage(self, chunk: CommTask, slot: Slot) -> None:
        """Puts what ``chunk`` has of ``slot``, which is updated, where `send` finds it.

        At once: the script may write to the parameter before the rest of the chunk is updated.
        """
        self._stage(chunk, _parameters, slot)

    def send(self, chunk: CommTask, turn: int) -> None:
        """Sends the parameters of ``chunk``, which are staged, to all other ranks."""
        self._carrier.spread(chunk, turn)

    @torch.no_grad()
    def send_gradients(self, chunk: CommTask, part_of: Callable[[Slice], torch.Tensor]) -> None:
        """Sends what ``part_of`` finds for each slice of ``chunk``, in the turn armed last."""
        self._stage(chunk, part_of)
        self._carrier.spread(chunk, self.turn)

    def spread(self, chunk: CommTask) -> None:
        """What was sent of ``chunk`` has left."""
        with self._progress.changed:
            self._round.under_way.left(chunk)
            self._progress.notify()

    def gathered(self, chunk: CommTask) -> None:
        """What was expected of ``chunk`` is in the arena."""
        with self._progress.changed:
            self._updater.push(self._round.came(chunk))
            self._progress.notify()

    def _stage(
        self,
        chunk: CommTask,
        part_of: Callable[[Slice], torch.Tensor],
        only: Slot | None = None,
    ) -> None:
        memory, offset = self._carrier.stage(chunk), 0
        for slice_ in self._plan.slices[chunk.index]:
            n = slice_.stop_at - slice_.start_at
            if only is None or slice_.slot is only:
                memory[offset : offset + n].copy_(part_of(slice_))
            offset += n

    def __repr__(self) -> str:
        return f"<Spreading, turn {self.turn}>"


def _parameters(slice_: Slice) -> torch.Tensor:
    alias = slice_.slot.alias.detach()
    return elements(alias, slice_.slot.view, slice_.start_at, slice_.stop_at)


def _chunks_of(slots: Iterable[Slot]) -> list[CommTask]:
    return list({chunk.index: chunk for slot in slots for chunk in slot.chunks}.values())
