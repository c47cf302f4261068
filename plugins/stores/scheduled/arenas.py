"""Where keys lie: in arenas of one dtype, in the order of `init`, cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from bytesched.errors import PluginError
from bytesched.kvstore.pipes import Chunk
from bytesched.kvstore.protocol import Key
from bytesched.task import CommTask

__all__ = ["KeySlot", "fill", "flattened", "lay_out", "plain", "zeros"]


@dataclass(eq=False)
class KeySlot:
    """One key of the user, and how far its step is."""

    key: Key
    number: int
    #: lower goes first
    priority: int
    #: shape and dtype
    what: str
    shape: tuple[int, ...]
    #: its memory, flat; pushes are read from here, and pulls arrive here
    flat: Any
    #: where that begins in its arena, in elements
    start_at: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    #: pushed, and not pulled since
    is_pushed: bool = False
    #: the array that waits to be filled
    out: Any = None
    #: chunks that were asked for, and have not been pulled
    missing: set[Chunk] = field(default_factory=set)
    #: how often it was pushed
    steps: int = 0
    #: waits of the user before its first push; keys of one segment may share a chunk
    segment: int = -1

    @property
    def nbytes(self) -> int:
        """Size of the value, in bytes."""
        return int(self.flat.nbytes)


def plain(value: Any) -> Any:
    """``value`` without its part in autograd, sharing its memory."""
    return value.detach() if hasattr(value, "detach") else value


def fill(target: Any, value: Any) -> None:
    """Copies ``value`` into ``target``; each may be a tensor or an array."""
    if hasattr(target, "detach") and not hasattr(value, "detach"):
        import torch

        value = torch.tensor(value)
    target[...] = value


def flattened(value: Any) -> Any:
    """A copy of ``value``, flat and in the host's memory, of its kind and dtype."""
    if not (type(value).__module__.startswith("numpy") or hasattr(value, "detach")):
        raise PluginError(
            f"a value of type {type(value).__qualname__}: torch tensors and numpy arrays can be "
            "scheduled"
        )
    flat = zeros(value, value.reshape(-1).shape[0])
    flat[...] = plain(value).reshape(-1)
    return flat


def zeros(like: Any, size: int) -> Any:
    """A flat array of the kind and dtype of ``like``, in the host's memory."""
    if hasattr(like, "detach"):
        import torch

        return torch.zeros(size, dtype=like.dtype)
    import numpy as np

    return np.zeros(size, dtype=like.dtype)


def lay_out(
    slots: Sequence[KeySlot], *, partition_bytes: int, merge: bool, generation: int
) -> list[Chunk]:
    """Chunks of about ``partition_bytes`` over all keys, and new memory for the keys in them.

    With ``merge``, neighbours of one dtype and one segment share a chunk where they are small.
    """
    chunks: list[Chunk] = []
    for run in _runs(slots, merge=merge):
        arena = zeros(run[0].flat, sum(slot.flat.shape[0] for slot in run))
        tasks, owner, offset = [], {}, 0
        for slot in run:
            size = slot.flat.shape[0]
            arena[offset : offset + size] = slot.flat
            slot.flat = arena[offset : offset + size]
            slot.start_at = offset
            slot.chunks = []
            task = CommTask(
                str(slot.key),
                start_at=offset,
                stop_at=offset + size,
                itemsize=arena.itemsize,
                priority=slot.priority,
            )
            tasks.append(task)
            owner[task] = slot
            offset += size
        parts = CommTask.merge(tasks).partition(partition_bytes)
        for number, part in enumerate(parts):
            key: Key = run[0].key
            if len(run) > 1 or len(parts) > 1:
                key = f"{run[0].key}/{run[0].number}.{generation}.{number}"
            buffer = arena[part.start_at : part.stop_at]
            chunk = Chunk(key, part, buffer, buffer, asked_for=part.members)
            chunks.append(chunk)
            for member in part.members:
                owner[member].chunks.append(chunk)
    return chunks


def _runs(slots: Sequence[KeySlot], *, merge: bool) -> list[list[KeySlot]]:
    """Slots that share an arena; empty ones have none."""
    sized = [slot for slot in slots if slot.flat.shape[0]]
    if not merge:
        return [[slot] for slot in sized]

    def shared(slot: KeySlot) -> tuple[object, ...]:
        alone = slot.number if slot.segment < 0 else -1
        return str(slot.flat.dtype), type(slot.flat), slot.segment, alone

    ordered = sorted(sized, key=lambda slot: (slot.priority, slot.number))
    return [list(run) for _, run in groupby(ordered, key=shared)]
