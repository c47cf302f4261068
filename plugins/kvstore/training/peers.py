"""A KVStore as what carries a session: a chunk is a key, its push and its pull two tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final

import torch

from bytesched.config import Config
from bytesched.errors import PeerLost, PluginError, SchedulerClosed, SchedulerTimeout
from bytesched.kvstore.pipes import Chunk, Pipes
from bytesched.observe import Observers
from bytesched.order import Leading, ReadyQueue
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.session.peers import Agreement
from bytesched.plugins.session.streams import Streams
from bytesched.policy import named_policy
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask
from bytesched.transport import Done
from bytesched.tunable import Setting

__all__ = ["KVPeers"]

#: The session's scheduler lets everything through: the two pipes behind it have credits.
_NO_LIMIT: Final = 1 << 62


class KVPeers:
    """The workers of a store (see peers.Peers).

    Args:
        store: sums; every key of ours begins with ``name``.
        name: of the session, the same on all workers, unique in this store.
    """

    hides_overhead = True
    backend = "kvstore"
    #: its pipes are opened once
    knobs: frozenset[str] = frozenset()
    replayed: frozenset[str] = frozenset()

    def __init__(self, store: Any, *, name: str, timeout_s: float) -> None:
        self.rank: int = store.rank
        self.size = self.divisor = int(store.num_workers)
        self.timeout_s = timeout_s
        self._store = store
        self._name = name
        self._known: set[str] = set()
        #: what is sent for each chunk, by its index
        self._packed: dict[int, torch.Tensor] = {}
        self._note = ""
        self._transport: _KVTransport
        self._policy = ""

    def sum(self, tensor: torch.Tensor, key: str) -> Any:
        return self._pushpull(_part(key, tensor), tensor)

    def forget(self, tensor: torch.Tensor, key: str) -> None:
        """Gives back what the store keeps for sums of such tensors; collective."""
        if hasattr(self._store, "delete"):
            name = f"{self._name}/{_part(key, tensor)}"
            self._store.delete(name)
            self._known.discard(name)

    def reduce(self, chunk: CommTask, packed: torch.Tensor) -> Any:
        self._packed[chunk.index] = packed
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

    def transport(self, packer: Packer, streams: Streams) -> _KVTransport:
        self._transport = _KVTransport(self, packer, streams)
        return self._transport

    def agreement(self, chunks: Sequence[CommTask], config: Config) -> Agreement:
        self._policy = config.policy
        return _InTwoPipes(self, chunks, config.policy)

    def open_pipes(self, chunks: Sequence[CommTask], credit_bytes: int) -> None:
        """The transport can start; collective."""
        self._transport.open(chunks, policy=self._policy, credit_bytes=credit_bytes)

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

    def packed(self, chunk: CommTask, packer: Packer) -> torch.Tensor:
        """What is sent for ``chunk``; that of gradients has been reduced once, and is kept."""
        buffer = self._packed.get(chunk.index)
        return packer.pack(chunk) if buffer is None else buffer

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


class _InTwoPipes:
    """A store needs no common order: it sums key by key (see peers.Agreement)."""

    order = "each worker's own"

    def __init__(self, peers: KVPeers, chunks: Sequence[CommTask], policy: str) -> None:
        self._peers = peers
        self._chunks = chunks
        self._policy = policy

    def queue(self) -> ReadyQueue:
        return Leading(named_policy(self._policy))

    def window_bytes(self, credit_bytes: int) -> int:
        self._peers.open_pipes(self._chunks, credit_bytes)
        return _NO_LIMIT

    def bind(self, scheduler: Scheduler) -> None:
        pass

    def ready(self) -> None:
        pass

    def announce(self, chunks: Sequence[CommTask]) -> None:
        pass

    def round_ends(self) -> None:
        pass

    def change(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        raise PluginError(f"the chunks of a store stay as they are: {setting}")

    def close(self) -> None:
        pass


class _KVTransport:
    """Packs a chunk, and reports it as sent when its sum has come back."""

    def __init__(self, peers: KVPeers, packer: Packer, streams: Streams) -> None:
        self._peers = peers
        self._packer = packer
        self._streams = streams
        self._chunks: list[Chunk] = []
        self._done: dict[int, tuple[CommTask, Done]] = {}
        self._pipes: Pipes | None = None
        self._closed = False

    def open(self, tasks: Sequence[CommTask], *, policy: str, credit_bytes: int) -> None:
        """Two pipes for these chunks, each with that credit; collective."""
        for task in tasks:
            buffer = self._peers.packed(task, self._packer)
            push = CommTask(
                task.name,
                start_at=task.start_at,
                stop_at=task.stop_at,
                itemsize=task.itemsize,
                priority=task.priority,
            )
            key = self._peers.key(str(task.index), buffer)
            self._chunks.append(Chunk(key, push, buffer, buffer))
        self._pipes = Pipes(
            self._peers.store,
            self._chunks,
            policy=policy,
            push_credit_bytes=credit_bytes,
            pull_credit_bytes=credit_bytes,
            on_pushed=lambda chunk: None,
            on_pulled=self._pulled,
            on_error=self._failed,
            observers=Observers(),
        )

    def start(self, task: CommTask, done: Done) -> None:
        if self._closed or self._pipes is None:
            raise SchedulerClosed(f"{task!r} was started on a closed transport")
        with self._streams.communication(task):
            self._packer.pack(task)
        self._done[task.index] = (task, done)
        chunk = self._chunks[task.index]
        self._pipes.ask(chunk)
        chunk.push_task.notify_ready()
        self._pipes.push(chunk)

    def close(self) -> None:
        self._closed = True
        if self._pipes is not None:
            self._pipes.close()
        self._failed(SchedulerClosed("closed while chunks were under way"))

    def _pulled(self, chunk: Chunk) -> None:
        task, done = self._done.pop(chunk.push_task.index)
        with self._streams.completion(task):
            self._packer.receive(task)
        self._packer.let_go(task)
        done(task, None)

    def _failed(self, error: BaseException) -> None:
        for index in list(self._done):
            if (entry := self._done.pop(index, None)) is not None:
                entry[1](entry[0], error)
