"""A key of a worker, in chunks, and what it has under way with its store."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

from bytesched.errors import PluginError
from bytesched.kvstore.pipes import Chunk, Pipes, Work
from bytesched.kvstore.protocol import Key, describe
from bytesched.task import CommTask


@dataclass(eq=False)
class KeySlot:
    """One key of the user, and how far its step is."""

    key: Key
    #: shape and dtype
    what: str
    shape: tuple[int, ...]
    #: its memory, flat; pushes are read from here, and pulls arrive here
    flat: Any
    #: each with its part of that
    chunks: list[tuple[Chunk, Any]]
    #: pushed, and not pulled since
    is_pushed: bool = False
    #: the last push, chunk by chunk
    pushes: list[Work] = field(default_factory=list)
    #: the end of the last pull, until somebody has waited for it
    pulled: Work | None = None
    #: chunks of it that are not there
    missing: int = 0
    #: how often it was pushed
    steps: int = 0
    #: guards what is missing
    _lock: Lock = field(default_factory=Lock)

    @property
    def nbytes(self) -> int:
        return int(self.flat.nbytes)

    def set_priority(self, priority: int) -> None:
        """Lower goes first; nothing of it is under way."""
        for chunk, _ in self.chunks:
            chunk.set_priority(priority)

    def push(self, pipes: Pipes, value: Any) -> None:
        """Begins to push ``value``, of which a copy is made."""
        fill(self.flat, plain(value).reshape(-1))
        self.is_pushed = True
        self.pushes = [pipes.push(chunk, memory) for chunk, memory in self.chunks]

    def pull(self, pipes: Pipes, out: Any) -> None:
        """Fills ``out`` when the value is here."""
        self.pulled, self.missing = Work(), len(self.chunks)
        if not self.chunks:
            self._fill(pipes, self.pulled, plain(out))
        for chunk, memory in self.chunks:
            ended = partial(self._pulled, pipes, self.pulled, plain(out))
            pipes.pull(chunk, memory).add_done_callback(ended)

    def _pulled(self, pipes: Pipes, whole: Work, out: Any, part: Future[None]) -> None:
        """A chunk is there, or cannot come. Any thread."""
        with self._lock:
            self.missing -= 1
            if self.missing:
                return
        # Which may be that of another chunk.
        if pipes.error is None:
            self._fill(pipes, whole, out)
        else:
            whole.set_exception(pipes.error)

    def _fill(self, pipes: Pipes, whole: Work, out: Any) -> None:
        try:
            fill(out, self.flat.reshape(self.shape))
        except Exception as error:  # noqa: BLE001 - it must reach the user's thread
            pipes.fail(error)
            whole.set_exception(error)
        else:
            self.is_pushed = False
            whole.set_result(None)

    def wait(self, pipes: Pipes) -> None:
        """Returns when the last pull has ended."""
        if self.pulled is not None:
            pipes.wait(self.pulled, f"the pull of key {self.key!r}")
            self.pulled = None

    def wait_pushes(self, pipes: Pipes) -> None:
        """Returns when the last push has ended."""
        for work in self.pushes:
            pipes.wait(work, "all pushes")


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
        slot.chunks.append((Chunk(name, part), flat[part.start_at : part.stop_at]))
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
