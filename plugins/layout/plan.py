"""The plan: gradients in arenas in forward order, cut into chunks, bundled for their update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise
from typing import Final, TypeAlias

import torch

from bytesched.link.sizes import first_bytes
from bytesched.task import CommTask

from .flags import cell_count
from .partition import Partition
from .slots import Bundle, Slice, Slot

__all__ = ["Ownership", "Plan", "Share"]


#: What is sent from where it is kept moves to its arena once; so much of it is there twice.
_SEGMENT_BYTES: Final = 16 * 2**20

#: what can be in one arena: of a dtype, a device, a group of ranks, and a segment
_Kind: TypeAlias = tuple[torch.dtype, torch.device, "Partition | None", int]


@dataclass(frozen=True, eq=False)
class _Arena:
    """The gradients of one dtype, device and group of ranks, one after the other."""

    memory: torch.Tensor
    #: of its slots in the plan
    positions: list[int]


@dataclass(frozen=True)
class Ownership:
    """Which rank sums which tensor."""

    ranks: int
    #: by position in the plan; None: no rank alone
    owners: Sequence[int | None]
    #: by position: no chunk has tensors of different kinds
    kinds: Sequence[int] = ()
    #: by position, of those that every rank owns a part of: where parts end, in elements, by rank
    bounds: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Share:
    """Elements of a tensor that one rank owns, in memory order."""

    rank: int
    start_at: int
    stop_at: int


class Plan:
    """Arenas, chunks and bundles for a list of parameters in forward order.

    Chunks are numbered front to back, the same on all ranks; that number is their priority. The
    arenas are laid out once; chunks and bundles can be cut again, in the same lists.
    """

    def __init__(
        self, slots: Sequence[Slot], *, partition_bytes: int, find_unused: bool = False
    ) -> None:
        self.slots = list(slots)
        #: which slots got a gradient, summed over the ranks (see flags); the most urgent chunk
        self.used_flags: torch.Tensor | None = None
        self.flags_chunk: CommTask | None = None
        self.flags_reduced = False
        #: how many times it was cut
        self.cuts = 0
        self.chunks: list[CommTask] = []
        self.slices: list[list[Slice]] = []
        #: the arena memory of each chunk
        self.buffers: list[torch.Tensor] = []
        #: with an ownership: the rank that sums each chunk, and the chunks of tensors that no rank
        #: sums alone
        self.owners: list[int] = []
        self.shared: set[int] = set()
        self.bundles: list[Bundle] = []
        #: by the index of a chunk
        self.bundles_of: list[list[Bundle]] = []
        self.slots_of: list[list[Slot]] = []
        self._position = {slot: position for position, slot in enumerate(slots)}
        self._ownership: Ownership | None = None
        kinds: dict[_Kind, list[int]] = {}
        kept_bytes = 0
        for position, slot in enumerate(slots):
            dtype, device = slot.parameter.dtype, slot.parameter.device
            kind = dtype, device, slot.partition, kept_bytes // _SEGMENT_BYTES
            kinds.setdefault(kind, []).append(position)
            if slot.is_in_place:
                kept_bytes += slot.elements * dtype.itemsize
        self._arenas = [self._lay_out(*kind) for kind in kinds.items()]
        if find_unused:
            self.used_flags = torch.zeros(
                cell_count(slots), dtype=torch.int32, device=slots[0].parameter.device
            )
        self.cut(partition_bytes)

    def cut(self, partition_bytes: int, ownership: Ownership | None = None) -> None:
        """Makes chunks and bundles; nothing of those that there were may be under way.

        Gradients stay where they are, and so does everything that refers to a slot. With an
        ``ownership`` every chunk has one owner.
        """
        self.cuts += 1
        self._ownership = ownership
        for held in (self.chunks, self.slices, self.buffers):
            held.clear()
        for found in (self.bundles, self.bundles_of, self.slots_of):
            found.clear()
        for slot in self.slots:
            slot.chunks, slot.slices = [], []
        cut = [part for arena in self._arenas for part in self._cut(arena, partition_bytes)]
        if self.used_flags is not None:
            self.flags_chunk = CommTask(
                "used-parameters", start_at=0, stop_at=len(self.used_flags), itemsize=4, priority=-1
            )
            cut.append((self.flags_chunk, self.used_flags, []))
        for chunk, buffer, slices in sorted(cut, key=lambda part: part[0].priority):
            chunk.index = chunk.priority = len(self.chunks)
            self.chunks.append(chunk)
            self.buffers.append(buffer)
            self.slices.append(slices)
            self.slots_of.append([slice_.slot for slice_ in slices])
            for slice_ in slices:
                if slice_.slot.partition is not None:
                    chunk.group = slice_.slot.partition.number
                slice_.slot.chunks.append(chunk)
                slice_.slot.slices.append(slice_)
        self._bundle()
        self._deal()

    def _deal(self) -> None:
        """Finds the owner of each chunk."""
        self.owners.clear()
        self.shared.clear()
        if self._ownership is None:
            return
        owners = [self._owner_at(slices[0]) if slices else None for slices in self.slices]
        shared = [chunk for chunk in self.chunks if owners[chunk.index] is None]
        self.shared.update(chunk.index for chunk in shared)
        loads = [0] * self._ownership.ranks
        # The largest first, each to the rank that has least.
        for chunk in sorted(shared, key=lambda chunk: (-chunk.nbytes, chunk.index)):
            rank = loads.index(min(loads))
            owners[chunk.index] = rank
            loads[rank] += chunk.nbytes
        self.owners.extend(owner for owner in owners if owner is not None)

    def owner(self, slot: Slot) -> int | None:
        """The rank that sums the gradient of ``slot``; None: no rank alone."""
        return None if self._ownership is None else self._ownership.owners[self._position[slot]]

    def shares(self, slot: Slot) -> list[Share]:
        """What ranks own of ``slot``, front to back; empty if no rank owns any of it."""
        position, whole = self._position[slot], slot.elements
        bounds = () if self._ownership is None else self._ownership.bounds.get(position, ())
        if bounds:
            ranges = enumerate(pairwise([0, *bounds]))
            return [Share(rank, a, b) for rank, (a, b) in ranges if a < b]
        owner = self.owner(slot)
        return [] if owner is None else [Share(owner, 0, whole)]

    def measurer(self, slot: Slot) -> int | None:
        """Of several ranks that own a part of ``slot``, the one that measures all of it; by turns.

        None if there are not several.
        """
        shares = self.shares(slot)
        if self._ownership is None or len(shares) < 2:
            return None
        turn = sorted(self._ownership.bounds).index(self._position[slot])
        return shares[turn % len(shares)].rank

    def _owner_at(self, slice_: Slice) -> int | None:
        shares = self.shares(slice_.slot)
        return next((s.rank for s in shares if s.start_at <= slice_.start_at < s.stop_at), None)

    def kind(self, chunk: CommTask) -> int:
        """The kind of its tensors."""
        kinds = () if self._ownership is None else self._ownership.kinds
        slices = self.slices[chunk.index]
        return kinds[self._position[slices[0].slot]] if kinds and slices else 0

    def computed(self, chunk: CommTask) -> tuple[int, int]:
        """Sorts chunks as backward completes them, and those of one tensor front to back."""
        slices = self.slices[chunk.index]
        return -min((self._position[s.slot] for s in slices), default=-1), chunk.index

    def _lay_out(self, kind: _Kind, positions: list[int]) -> _Arena:
        slots = [self.slots[position] for position in positions]
        memory = torch.zeros(sum(slot.elements for slot in slots), dtype=kind[0], device=kind[1])
        offset = 0
        for slot in slots:
            slot.lay_out(memory[offset : offset + slot.elements])
            offset += slot.elements
        return _Arena(memory, positions)

    def _cut(
        self, arena: _Arena, partition_bytes: int
    ) -> list[tuple[CommTask, torch.Tensor, list[Slice]]]:
        memory = arena.memory
        kinds = self._ownership.kinds if self._ownership is not None else ()
        runs: dict[CommTask, tuple[int | None, int]] = {}
        slot_of: dict[CommTask, tuple[Slot, int]] = {}
        offset = 0
        for position in arena.positions:
            slot = self.slots[position]
            n = slot.elements
            shares: list[Share | None] = [*self.shares(slot)] or [None]
            for share in shares:
                task = CommTask(
                    slot.name,
                    start_at=offset + (share.start_at if share else 0),
                    stop_at=offset + (share.stop_at if share else n),
                    itemsize=memory.element_size(),
                    priority=position,
                )
                runs[task] = share.rank if share else None, kinds[position] if kinds else 0
                slot_of[task] = slot, offset
            offset += n
        cut = []
        for chunk in self._chunks_of(runs, partition_bytes):
            slices = []
            for task in chunk.members:
                slot, at = slot_of[task]
                a, b = max(task.start_at, chunk.start_at), min(task.stop_at, chunk.stop_at)
                whole = b - a == slot.elements
                slices.append(Slice(slot, a - at, b - at, memory[a:b], whole))
            cut.append((chunk, memory[chunk.start_at : chunk.stop_at], slices))
        return cut

    def _chunks_of(
        self, tasks: Mapping[CommTask, tuple[int | None, int]], partition_bytes: int
    ) -> list[CommTask]:
        """Chunks of about ``partition_bytes``, none with tasks of two owners or kinds."""
        runs = [list(run) for _, run in groupby(tasks, key=tasks.__getitem__)]
        first = CommTask.merge(runs[0]).partition(partition_bytes, first_bytes(partition_bytes))
        others = (CommTask.merge(run).partition(partition_bytes) for run in runs[1:])
        return [*first, *chain.from_iterable(others)]

    def _bundle(self) -> None:
        by_last: dict[int, list[Slot]] = {}
        for slot in self.slots:
            by_last.setdefault(max(chunk.index for chunk in slot.chunks), []).append(slot)
        self.bundles_of.extend([] for _ in self.chunks)
        for last in sorted(by_last):
            slots = by_last[last]
            chunks = {chunk for slot in slots for chunk in slot.chunks}
            nbytes = sum(slot.elements * slot.view.element_size() for slot in slots)
            bundle = Bundle(len(self.bundles), slots, chunks, nbytes)
            self.bundles.append(bundle)
            for slot in slots:
                slot.bundle = bundle
            for chunk in chunks:
                self.bundles_of[chunk.index].append(bundle)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def __repr__(self) -> str:
        return (
            f"<Plan {len(self.slots)} parameters, {self.nbytes / 2**20:.1f} MiB in "
            f"{len(self.chunks)} chunks, {len(self.bundles)} bundles>"
        )
