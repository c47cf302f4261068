"""The workers of a KVStore: what they tell each other before they train."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Final, TypeAlias

import torch

from bytesched.errors import SchedulerTimeout

__all__ = ["Workers", "push_bytes_per_s"]

#: of the measurement of a rate
_PROBE_BYTES: Final = 2**20
_ROUNDS: Final = 3

_Ends: TypeAlias = SimpleQueue[BaseException | None]


class Workers:
    """The workers of one session.

    Args:
        store: sums; every key of ours begins with ``name``.
        name: of the session, the same on all workers, unique in this store.
        timeout_s: how long any wait of the session may take.
    """

    def __init__(self, store: Any, *, name: str, timeout_s: float) -> None:
        self.rank: int = store.rank
        self.size = int(store.num_workers)
        self.timeout_s = timeout_s
        #: what moves the values
        self.store = store
        self._name = name
        self._known: set[str] = set()

    # -- keys --------------------------------------------------------------------------

    def key(self, part: str, like: torch.Tensor) -> str:
        """The key for ``part``, made on its first use; collective then."""
        key = f"{self._name}/{part}"
        if key not in self._known:
            self.store.init(key, like)
            self._known.add(key)
        return key

    def delete(self, part: str) -> None:
        """Gives back what the store keeps for ``part``, if it can; collective."""
        key = f"{self._name}/{part}"
        if hasattr(self.store, "delete"):
            self.store.delete(key)
            self._known.discard(key)

    # -- sums --------------------------------------------------------------------------

    def sum(self, tensor: torch.Tensor, key: str) -> None:
        """Sums ``tensor`` over the workers, in place; collective.

        Raises `SchedulerTimeout`, where the store can be asked without a wait.
        """
        self._wait(self._begin(tensor, key), key)

    def sum_all(self, tensors: Sequence[torch.Tensor], keys: Sequence[str]) -> None:
        """The same for several at once, where the store can be asked so."""
        ends = [self._begin(tensor, key) for tensor, key in zip(tensors, keys, strict=True)]
        for end, key in zip(ends, keys, strict=True):
            self._wait(end, key)

    def _begin(self, tensor: torch.Tensor, key: str) -> _Ends:
        """Where the sum of ``tensor`` ends, with its error if there is one."""
        name, store, ends = self.key(_part(key, tensor), tensor), self.store, _Ends()

        def pushed(error: BaseException | None) -> None:
            if error is None:
                store.start_pull(name, tensor, ends.put)
            else:
                ends.put(error)

        if hasattr(store, "start_push"):
            store.start_push(name, tensor, pushed)
        else:
            store.pushpull(name, tensor)
            ends.put(None)
        return ends

    def _wait(self, ends: _Ends, key: str) -> None:
        try:
            error = ends.get(timeout=2 * self.timeout_s)
        except Empty:
            raise SchedulerTimeout(
                f"the store has not answered within {2 * self.timeout_s:g} s",
                task=key,
                rank=self.rank,
            ) from None
        if error is not None:
            raise error

    def forget(self, tensor: torch.Tensor, key: str) -> None:
        """Gives back what the store keeps for sums of such tensors; collective."""
        self.delete(_part(key, tensor))

    def is_same(self, text: str) -> bool:
        """Whether all workers have the same ``text``; collective."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        return len(set(self.gather_text("plan", digest))) == 1

    def gather_text(self, key: str, text: str) -> list[str]:
        """Every worker's ``text``, by rank; collective."""
        data = text.encode()
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        self.sum(lengths, f"{key} length")
        texts = torch.zeros(self.size, max(1, int(lengths.max())), dtype=torch.uint8)
        texts[self.rank, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.sum(texts, key)
        return [
            row.numpy().tobytes()[:length].decode()
            for row, length in zip(texts, lengths.tolist(), strict=True)
        ]

    def leaders(self, numbers: Sequence[int], key: str) -> list[int]:
        """The numbers of worker 0, as many as here; collective."""
        mine = torch.tensor(numbers if self.rank == 0 else [0] * len(numbers))
        self.sum(mine, key)
        return [int(number) for number in mine.tolist()]

    def clock_offset_ns(self) -> int:
        """What must be added to this host's wall clock to read worker 0's; collective."""
        for _ in range(3):
            # The last one ends at nearly the same moment everywhere.
            self.sum(torch.zeros(1), "clock")
        mine_ns = time.time_ns()
        [leaders_ns] = self.leaders([mine_ns], "clock of worker 0")
        return leaders_ns - mine_ns

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Gives every worker the tensors of worker 0; collective."""
        for number, tensor in enumerate(tensors):
            part = f"initial {number}"
            self.store.pull(self.key(part, tensor), tensor)
            self.delete(part)


def _part(key: str, tensor: torch.Tensor) -> str:
    return f"{key} {tensor.dtype} {tuple(tensor.shape)}"


def push_bytes_per_s(workers: Workers, servers: int) -> float:
    """The rate of one worker's pushes, the same on all workers; collective.

    As many keys as servers are pushed, and pulled when they are there: every byte passes twice.
    """
    probes = [torch.zeros(_PROBE_BYTES // 4) for _ in range(servers)]
    keys = [f"probe {number}" for number in range(servers)]
    for probe, key in zip(probes, keys, strict=True):
        # Makes the key, and opens a connection.
        workers.sum(probe, key)
    rounds_s = []
    for _ in range(_ROUNDS):
        # The sum before has ended everywhere at nearly the same moment.
        began_s = perf_counter()
        workers.sum_all(probes, keys)
        rounds_s.append(perf_counter() - began_s)
    for probe, key in zip(reversed(probes), reversed(keys), strict=True):
        workers.forget(probe, key)
    mine = 2 * servers * _PROBE_BYTES / min(rounds_s)
    # A worker that starts late sees a free link.
    return min(float(text) for text in workers.gather_text("rate", repr(mine)))
