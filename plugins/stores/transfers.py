"""The keys of one worker, in chunks, and what it has under way with its store."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from time import perf_counter_ns
from typing import Any

from bytesched.config import Config
from bytesched.errors import PluginError, in_one_line
from bytesched.kvstore.pipes import Chunk, Pipes, Work
from bytesched.kvstore.protocol import Key, KVStore, describe
from bytesched.observe import Observers
from bytesched.task import CommTask

__all__ = ["KeySlot", "Transfers", "cut", "fill", "plain"]

log = logging.getLogger("bytesched")

_WORST = 8


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

    @property
    def nbytes(self) -> int:
        """Size of the value, in bytes."""
        return int(self.flat.nbytes)

    def set_priority(self, priority: int) -> None:
        """Lower goes first; nothing of it is under way."""
        for chunk, _ in self.chunks:
            chunk.set_priority(priority)


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


class Transfers:
    """Pushes and pulls of keys, in chunks, through two pipes.

    Args:
        credit_bytes: most bytes on their way in each pipe.
    """

    def __init__(
        self, store: KVStore, config: Config, observers: Observers, *, credit_bytes: int
    ) -> None:
        self._observers = observers
        self.slots: dict[Key, KeySlot] = {}
        self._wait_ns: Counter[str] = Counter()
        #: guards what is missing of a key
        self._lock = Lock()
        self.pipes = Pipes(
            store,
            policy=config.policy,
            credit_bytes=credit_bytes,
            timeout_s=config.timeout_s,
            observers=observers,
        )

    def add(self, slot: KeySlot) -> None:
        """One more key; nothing is under way."""
        self.slots[slot.key] = slot
        for chunk, _ in slot.chunks:
            self.pipes.add(chunk)

    def push(self, slot: KeySlot, value: Any) -> None:
        """Begins to push ``value``, of which a copy is made."""
        fill(slot.flat, plain(value).reshape(-1))
        slot.is_pushed = True
        slot.pushes = [self.pipes.push(chunk, memory) for chunk, memory in slot.chunks]

    def pull(self, slot: KeySlot, out: Any) -> None:
        """Fills ``out`` when the value is here."""
        slot.pulled, slot.missing = Work(), len(slot.chunks)
        if not slot.chunks:
            self._fill(slot, slot.pulled, plain(out))
        for chunk, memory in slot.chunks:
            ended = partial(self._pulled, slot, slot.pulled, plain(out))
            self.pipes.pull(chunk, memory).add_done_callback(ended)

    def _pulled(self, slot: KeySlot, whole: Work, out: Any, part: Future[None]) -> None:
        """A chunk of ``slot`` is there, or cannot come. Any thread."""
        with self._lock:
            slot.missing -= 1
            if slot.missing:
                return
        # Which may be that of another chunk.
        if self.pipes.error is None:
            self._fill(slot, whole, out)
        else:
            whole.set_exception(self.pipes.error)

    def _fill(self, slot: KeySlot, whole: Work, out: Any) -> None:
        """The value of ``slot`` is there."""
        try:
            fill(out, slot.flat.reshape(slot.shape))
        except Exception as error:  # noqa: BLE001 - it must reach the user's thread
            self.pipes.fail(error)
            whole.set_exception(error)
        else:
            slot.is_pushed = False
            whole.set_result(None)

    def wait_for(self, slot: KeySlot) -> None:
        """Returns when the pull of ``slot`` has ended, if one is under way."""
        if slot.pulled is None:
            return
        began_ns = perf_counter_ns()
        self.pipes.wait(slot.pulled, f"the pull of key {slot.key!r}")
        slot.pulled = None
        now_ns = perf_counter_ns()
        self._wait_ns[str(slot.key)] += now_ns - began_ns
        if self._observers:
            self._observers.on_span("wait", str(slot.key), began_ns, now_ns)

    def wait_all(self) -> None:
        """Returns when every pull and every push has ended."""
        for slot in self.slots.values():
            self.wait_for(slot)
        for slot in self.slots.values():
            for work in slot.pushes:
                self.pipes.wait(work, "all pushes")

    def end(self) -> None:
        """What is under way ends, for the sake of the other workers; then our threads."""
        try:
            self.wait_all()
        except Exception as error:  # noqa: BLE001 - nobody is left to raise it to
            log.error("a wrapped store that was dropped: %s", in_one_line(error))
        self.pipes.close()
        self._observers.close()

    def figures(self, steps: int) -> dict[str, int | float]:
        """Times per step, so far."""
        exposed_ms = sum(self._wait_ns.values()) / 1e6 / steps
        worst = self._wait_ns.most_common(_WORST)
        return {
            "exposed_comm_ms": exposed_ms,
            **self.pipes.figures(steps),
            **{f"wait_ms/{name}": ns / 1e6 / steps for name, ns in worst},
        }
