"""Keys of a user, each in memory of its own, cut into chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bytesched.errors import PluginError
from bytesched.kvstore.pipes import Chunk
from bytesched.kvstore.protocol import Key, describe
from bytesched.task import CommTask

__all__ = ["KeySlot", "cut", "fill", "plain"]


@dataclass(eq=False)
class KeySlot:
    """One key of the user, and how far its step is."""

    key: Key
    #: shape and dtype
    what: str
    shape: tuple[int, ...]
    #: its memory, flat; pushes are read from here, and pulls arrive here
    flat: Any
    chunks: list[Chunk]
    #: pushed, and not pulled since
    is_pushed: bool = False
    #: the array that waits to be filled
    out: Any = None
    #: chunks that were asked for, and have not been pulled
    missing: set[Chunk] = field(default_factory=set)
    #: how often it was pushed
    steps: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the value, in bytes."""
        return int(self.flat.nbytes)

    def set_priority(self, priority: int) -> None:
        """Lower goes first; nothing of it is under way."""
        for chunk in self.chunks:
            chunk.push_task.priority = chunk.pull_task.priority = priority


def plain(value: Any) -> Any:
    """``value`` without its part in autograd, sharing its memory."""
    return value.detach() if hasattr(value, "detach") else value


def fill(target: Any, value: Any) -> None:
    """Copies ``value`` into ``target``; each may be a tensor or an array."""
    if hasattr(target, "detach") and not hasattr(value, "detach"):
        import torch

        value = torch.tensor(value)
    target[...] = value


def cut(key: Key, number: int, value: Any, priority: int, partition_bytes: int) -> KeySlot:
    """Key ``number`` of the user, with a copy of ``value``, in chunks of about so many bytes.

    Raises PluginError if ``value`` is neither a tensor nor an array.
    """
    flat = _flattened(value)
    slot = KeySlot(key, describe(value), tuple(value.shape), flat, [])
    if not slot.nbytes:
        return slot
    whole = CommTask(str(key), start_at=0, stop_at=len(flat), itemsize=flat.itemsize)
    parts = whole.partition(partition_bytes)
    for place, part in enumerate(parts):
        # The number tells apart keys that look alike, such as 1 and "1".
        name = key if len(parts) == 1 else f"{key}/{number}.{place}"
        buffer = flat[part.start_at : part.stop_at]
        slot.chunks.append(Chunk(name, part, buffer, buffer))
    slot.set_priority(priority)
    return slot


def _flattened(value: Any) -> Any:
    """A copy of ``value``, flat and in the host's memory, of its kind and dtype."""
    flat: Any
    if hasattr(value, "detach"):
        import torch

        flat = torch.empty(value.numel(), dtype=value.dtype)
    elif type(value).__module__.startswith("numpy"):
        import numpy as np

        flat = np.empty(value.size, dtype=value.dtype)
    else:
        raise PluginError(
            f"a value of type {type(value).__qualname__}: torch tensors and numpy arrays can be "
            "scheduled"
        )
    flat[...] = plain(value).reshape(-1)
    return flat
