"""The second phase of a sharded session: what owners send, and what is done when it has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from bytesched.task import CommTask

from ..dependency.progress import Progress
from ..layout.packing import elements
from ..layout.plan import Plan
from ..layout.slots import Slice, Slot
from ..routes.split.turns import Sent
from ..update.updater import Updater
from .shards import OwnedShards

__all__ = ["SpreadCarrier", "Spreading"]


class SpreadCarrier(Protocol):
    """Carries chunks from their owners to all other ranks."""

    def arm(
        self, turn: int, leaving: Sequence[CommTask], coming: Mapping[CommTask, Sequence[slice]]
    ) -> None:
        """What this rank sends next may be of ``turn``: ``leaving``, while ``coming`` come.

        Of those that come, these elements alone are put in place.
        """

    def expect(self, chunks: Iterable[CommTask], sent: Sent) -> None:
        """The owners of ``chunks`` send this of each."""

    def stage(self, chunk: CommTask, turn: int) -> torch.Tensor:
        """Memory in the layout of ``chunk``, for what ``turn`` sends of it; waits for nothing."""

    def spread(self, chunk: CommTask, turn: int) -> None:
        """Sends what ``turn`` has staged of ``chunk`` to all others; lower turns first, from 1 on.

        What an earlier turn sends of ``chunk`` has left.
        """


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
        self._progress = progress
        self._carrier = carrier
        self._updater = updater
        self._round = progress.round
        #: of each chunk, its slices, and where each lies in it; and of each parameter, those of
        #: the chunks that this rank owns
        self._places = [_placed(slices) for slices in plan.slices]
        self._owned: dict[Slot, list[tuple[CommTask, Slice, slice]]] = {
            slot: [
                (chunk, slice_, place)
                for chunk in chunks
                for slice_, place in self._places[chunk.index]
                if slice_.slot is slot
            ]
            for slot, chunks in ownerships.chunks.items()
        }
        #: of what was armed last
        self.turn = 0
        #: of each chunk, the turns that have not left, in order; and those among them that are
        #: staged, while an earlier one is not or is on its way. Under the lock of progress
        self._turns: dict[int, deque[int]] = {}
        self._held: set[tuple[int, int]] = set()

    def owned_chunks(self, slots: Iterable[Slot]) -> list[CommTask]:
        """The chunks of ``slots`` that are updated here."""
        return _merged(map(self.ownerships.chunks.__getitem__, slots))

    def foreign_chunks(self, slots: Iterable[Slot]) -> list[CommTask]:
        """Those that are updated elsewhere."""
        return _merged(map(self.ownerships.foreign_chunks.__getitem__, slots))

    def arm(self, owned: Sequence[Slot], foreign: Sequence[Slot]) -> list[CommTask]:
        """Something of ``owned`` is sent and of ``foreign`` comes; returns what is to be expected.

        Some may be in both.

        It has the turn after that of the last one.

        Called with the lock of the session's progress held.
        """
        self.turn += 1
        expected, leaving = self.foreign_chunks(foreign), self.owned_chunks(owned)
        coming = set(foreign)
        self._carrier.arm(self.turn, leaving, {c: self._parts(c, coming) for c in expected})
        for chunk in leaving:
            self._turns.setdefault(chunk.index, deque()).append(self.turn)
        self._round.under_way.expect(expected, leaving)
        return expected

    def expect(self, chunks: Sequence[CommTask], sent: Sent) -> None:
        """The owners of ``chunks`` send their parameters, or their gradients."""
        self._carrier.expect(chunks, sent)

    @torch.no_grad()
    def stage(self, slots: Iterable[Slot], turn: int) -> list[CommTask]:
        """Puts what is owned of ``slots``, which ``turn`` has updated, where `send` finds it.

        At once: the script may write to a parameter before the rest of a chunk is updated.

        Returns its chunk for each slice.
        """
        memories: dict[int, torch.Tensor] = {}
        staged = []
        for slot in slots:
            alias = slot.alias.detach()
            for chunk, slice_, place in self._owned[slot]:
                if chunk.index not in memories:
                    memories[chunk.index] = self._carrier.stage(chunk, turn)
                part = elements(alias, slot.view, slice_.start_at, slice_.stop_at)
                memories[chunk.index][place].copy_(part)
                staged.append(chunk)
        return staged

    def send(self, chunk: CommTask, turn: int) -> None:
        """Sends what ``turn`` has staged of ``chunk``, after what earlier turns send of it.

        A later step may have updated its parameters before an earlier one has updated its own.
        """
        with self._progress.lock:
            if self._turns[chunk.index][0] != turn:
                self._held.add((chunk.index, turn))
                return
        self._carrier.spread(chunk, turn)

    @torch.no_grad()
    def send_gradients(self, chunk: CommTask, part_of: Callable[[Slice], torch.Tensor]) -> None:
        """Sends what ``part_of`` finds for each slice of ``chunk``, in the turn armed last."""
        memory = self._carrier.stage(chunk, self.turn)
        for slice_, place in self._places[chunk.index]:
            memory[place].copy_(part_of(slice_))
        self.send(chunk, self.turn)

    def spread(self, chunk: CommTask) -> None:
        """What was sent of ``chunk`` has left."""
        with self._progress.lock:
            turns = self._turns[chunk.index]
            turns.popleft()
            following = turns[0] if turns and (chunk.index, turns[0]) in self._held else None
            if following is not None:
                self._held.remove((chunk.index, following))
            self._round.under_way.left(chunk)
            self._progress.notify()
        if following is not None:
            self._carrier.spread(chunk, following)

    def gathered(self, chunk: CommTask) -> None:
        """What was expected of ``chunk`` is in the arena."""
        with self._progress.lock:
            self._updater.push(self._round.came(chunk))
            self._progress.notify()

    def _parts(self, chunk: CommTask, slots: Collection[Slot]) -> list[slice]:
        """Which elements of ``chunk`` are of ``slots``: as few slices as there can be."""
        found: list[slice] = []
        for slice_, place in self._places[chunk.index]:
            if slice_.slot in slots:
                is_next = bool(found) and found[-1].stop == place.start
                found.append(slice(found.pop().start if is_next else place.start, place.stop))
        return found

    def __repr__(self) -> str:
        return f"<Spreading, turn {self.turn}>"


def _placed(slices: Iterable[Slice]) -> list[tuple[Slice, slice]]:
    """The slices of a chunk, and where each lies in it."""
    found, offset = [], 0
    for slice_ in slices:
        start, offset = offset, offset + slice_.stop_at - slice_.start_at
        found.append((slice_, slice(start, offset)))
    return found


def _merged(chunks: Iterable[Iterable[CommTask]]) -> list[CommTask]:
    """Each of these once."""
    return list({chunk.index: chunk for some in chunks for chunk in some}.values())
