"""The plan: gradients in arenas in forward order, cut into chunks, bundled for their update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from bytesched.link.sizes import first_bytes
from bytesched.task import CommTask

from .slots import Bundle, Slice, Slot

__all__ = ["Plan"]


#: what can be in one arena: of a dtype and a device
_Kind: TypeAlias = tuple[torch.dtype, torch.device]


@dataclass(frozen=True, eq=False)
class _Arena:
    """The gradients of one dtype and device, one after the other."""

    memory: torch.Tensor
    #: of its slots in the plan
    positions: list[int]


class Plan:
    """Arenas, chunks and bundles for a list of parameters in forward order.

    Chunks are numbered front to back, the same on all ranks; that number is their priority. The
    arenas are laid out once; chunks and bundles can be cut again, in the same lists.
    """

    def __init__(
        self, slots: Sequence[Slot], *, partition_bytes: int, find_unused: bool = False
    ) -> None:
        self.slots = list(slots)
        #: which slots got a gradient, summed over the ranks; the most urgent chunk
        self.used_flags: torch.Tensor | None = None
        self.flags_chunk: CommTask | None = None
        self.flags_reduced = False
        self.chunks: list[CommTask] = []
        self.slices: list[list[Slice]] = []
        #: the arena memory of each chunk
        self.buffers: list[torch.Tensor] = []
        self.bundles: list[Bundle] = []
        #: by the index of a chunk
        self.bundles_of: list[list[Bundle]] = []
        self.slots_of: list[list[Slot]] = []
        kinds: dict[_Kind, list[int]] = {}
        for position, slot in enumerate(slots):
            dtype, device = slot.parameter.dtype, slot.parameter.device
            kinds.setdefault((dtype, device), []).append(position)
        self._arenas = [self._lay_out(*kind) for kind in kinds.items()]
        if find_unused:
            device = slots[0].parameter.device
            self.used_flags = torch.zeros(len(slots), dtype=torch.int32, device=device)
        self.cut(partition_bytes)

    def cut(self, partition_bytes: int) -> None:
        """Makes chunks and bundles; nothing of those that there were may be under way.

        Gradients stay where they are, and so does everything that refers to a slot.
        """
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
                slice_.slot.chunks.append(chunk)
                slice_.slot.slices.append(slice_)
        self._bundle()

    def _lay_out(self, kind: _Kind, positions: list[int]) -> _Arena:
        slots = [self.slots[position] for position in positions]
        memory = torch.zeros(
            sum(slot.parameter.numel() for slot in slots), dtype=kind[0], device=kind[1]
        )
        offset = 0
        for slot in slots:
            slot.lay_out(memory[offset : offset + slot.parameter.numel()])
            offset += slot.parameter.numel()
        return _Arena(memory, positions)

    def _cut(
        self, arena: _Arena, partition_bytes: int
    ) -> list[tuple[CommTask, torch.Tensor, list[Slice]]]:
        memory = arena.memory
        slot_of: dict[CommTask, Slot] = {}
        offset = 0
        for position in arena.positions:
            slot = self.slots[position]
            task = CommTask(
                slot.name,
                start_at=offset,
                stop_at=offset + slot.parameter.numel(),
                itemsize=memory.element_size(),
                priority=position,
            )
            slot_of[task] = slot
            offset += slot.parameter.numel()
        cut = []
        whole = CommTask.merge(list(slot_of))
        for chunk in whole.partition(partition_bytes, first_bytes(partition_bytes)):
            slices = []
            for task in chunk.members:
                slot, at = slot_of[task], task.start_at
                a, b = max(at, chunk.start_at), min(task.stop_at, chunk.stop_at)
                slices.append(
                    Slice(slot, a - at, b - at, memory[a:b], b - a == slot.parameter.numel())
                )
            cut.append((chunk, memory[chunk.start_at : chunk.stop_at], slices))
        return cut

    def _bundle(self) -> None:
        by_last: dict[int, list[Slot]] = {}
        for slot in self.slots:
            by_last.setdefault(max(chunk.index for chunk in slot.chunks), []).append(slot)
        self.bundles_of.extend([] for _ in self.chunks)
        for last in sorted(by_last):
            slots = by_last[last]
            chunks = {chunk for slot in slots for chunk in slot.chunks}
            nbytes = sum(slot.parameter.numel() * slot.view.element_size() for slot in slots)
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
