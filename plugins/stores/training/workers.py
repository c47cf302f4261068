"""A KVStore as the backend of a session: what is summed is pushed and pulled under a key."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch

from bytesched.errors import PeerLost, SchedulerTimeout
from bytesched.observe import Observers
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ...layout.packing import Packer
from ...layout.plan import Plan
from ...routes.carrier import Carrier
from ...routes.streams import Streams
from .store_carrier import StoreCarrier

__all__ = ["StoreBackend"]


class StoreBackend:
    """The workers of a store (see backend.Backend).

    Args:
        store: sums; every key of ours begins with ``name``.
        name: of the session, the same on all workers, unique in this store.
    """

    sizes = "all-reduce"
    levels = 1
    wire = "kvstore"
    #: its pipes are opened once
    knobs: frozenset[str] = frozenset()
    plans = False

    def __init__(self, store: Any, *, name: str, timeout_s: float) -> None:
        self.rank: int = store.rank
        self.size = self.divisor = int(store.num_workers)
        self.timeout_s = timeout_s
        self._store = store
        self._name = name
        self._known: set[str] = set()
        self._note = ""

    def sum(self, tensor: torch.Tensor, key: str) -> Any:
        return self._pushpull(_part(key, tensor), tensor)

    def forget(self, tensor: torch.Tensor, key: str) -> None:
        """Gives back what the store keeps for sums of such tensors; collective."""
        if hasattr(self._store, "delete"):
            name = f"{self._name}/{_part(key, tensor)}"
            self._store.delete(name)
            self._known.discard(name)

    def reduce(self, chunk: CommTask, packed: torch.Tensor) -> Any:
        return self._pushpull(str(chunk.index), packed)

    def wait(self, work: Any, *, task: str = "") -> None:
        try:
            error = work(2 * self.timeout_s)
        except Empty:
            raise SchedulerTimeout(
                f"the store has not answered within {2 * self.timeout_s:g} s",
                task=task,
                rank=self.rank,
            ) from None
        if error is not None:
            raise error

    def is_same(self, text: str) -> bool:
        """Whether all workers have the same ``text``; collective."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        return len(set(self.gather_text("plan", digest))) == 1

    def gather_text(self, key: str, text: str) -> list[str]:
        """Every worker's ``text``, by rank; collective."""
        data = text.encode()
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        self.wait(self.sum(lengths, f"{key} length"))
        texts = torch.zeros(self.size, max(1, int(lengths.max())), dtype=torch.uint8)
        texts[self.rank, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.wait(self.sum(texts, key))
        return [
            row.numpy().tobytes()[:length].decode()
            for row, length in zip(texts, lengths.tolist(), strict=True)
        ]

    def clock_offset_ns(self) -> int:
        """What must be added to this host's wall clock to read worker 0's; collective."""
        for _ in range(3):
            # The last one ends at nearly the same moment everywhere.
            self.wait(self.sum(torch.zeros(1), "clock"), task="comparing clocks")
        mine_ns = time.time_ns()
        leaders = torch.tensor([mine_ns if self.rank == 0 else 0])
        self.wait(self.sum(leaders, "clock of worker 0"), task="comparing clocks")
        return int(leaders.item()) - mine_ns

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Gives every worker the tensors of worker 0; collective."""
        for number, tensor in enumerate(tensors):
            key = f"{self._name}/initial {number}"
            self._store.init(key, tensor)
            self._store.pull(key, tensor)
            if hasattr(self._store, "delete"):
                self._store.delete(key)

    def carrier(
        self,
        plan: Plan,
        packer: Packer,
        streams: Streams,
        setting: Setting,
        *,
        reduced: Callable[[CommTask], None],
        failed: Callable[[BaseException], None],
        observers: Observers,
    ) -> Carrier:
        keys = [self.key(str(chunk.index), packer.memory(chunk)) for chunk in plan.chunks]
        return StoreCarrier(
            self._store,
            keys,
            plan,
            packer,
            streams,
            setting,
            reduced=reduced,
            failed=failed,
            observers=observers,
        )

    def key(self, part: str, like: torch.Tensor) -> str:
        """The key for ``part``, made on its first use; collective then."""
        key = f"{self._name}/{part}"
        if key not in self._known:
            self._store.init(key, like)
            self._known.add(key)
        return key

    def timeout(self, message: str, story: Callable[[], str]) -> SchedulerTimeout:
        return SchedulerTimeout(message, rank=self.rank, story=story().splitlines())

    def leave_note(self, text: str) -> None:
        self._note = text

    def abort(self) -> None:
        reason = self._note or "it has failed"
        if hasattr(self._store, "fail_with"):
            self._store.fail_with(PeerLost(f"worker {self.rank} gave up: {reason}"))
        else:
            self._store.close()

    def close(self) -> None:
        pass

    @property
    def store(self) -> Any:
        """What moves the values."""
        return self._store

    def _pushpull(self, part: str, tensor: torch.Tensor) -> Callable[[float], Any]:
        key = self.key(part, tensor)
        if not hasattr(self._store, "start_push"):
            return lambda timeout_s: self._store.pushpull(key, tensor)
        ends: SimpleQueue[BaseException | None] = SimpleQueue()

        def pushed(error: BaseException | None) -> None:
            if error is None:
                self._store.start_pull(key, tensor, ends.put)
            else:
                ends.put(error)

        self._store.start_push(key, tensor, pushed)
        return lambda timeout_s: ends.get(timeout=timeout_s)


def _part(key: str, tensor: torch.Tensor) -> str:
    return f"{key} {tensor.dtype} {tuple(tensor.shape)}"
