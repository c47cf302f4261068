"""A KVStore as a wire: a chunk is a key, which is pushed, and pulled when it has been."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any, Final

import torch

from bytesched.config import Config
from bytesched.errors import PeerLost
from bytesched.kvstore.pipes import NO_LIMIT, Chunk, Pipes, Work
from bytesched.task import CommTask

from ...planned.wire import HOST

#: of what ranks tell each other: before all chunks
_FIRST: Final = -(1 << 30)
#: how long what is left may take when a session ends
_LEAVE_S: Final = 5.0


class StoreWire:
    """The workers of one session, and chunks through two pipes (see `planned.wire.Wire`).

    A store sums key by key, so that workers need no common order. What was cut last goes first
    among what is ready: the next forward pass begins with it.

    Args:
        store: sums; every key of ours begins with ``name``.
        name: of the session, the same on all workers, unique in this store.
        config: with the policy, and how long any wait of the session may take.
    """

    levels = 1
    sees_ends = True
    has_streams = False

    def __init__(self, store: Any, *, name: str, config: Config) -> None:
        self.rank: int = store.rank
        self.size = int(store.num_workers)
        self.timeout_s = config.timeout_s
        #: what moves the values
        self.store = store
        self._name = name
        #: keys that the store has
        self._known: set[str] = set()
        #: by its place in the plan, or what it tells
        self._chunks: dict[str, Chunk] = {}
        self._told: dict[str, Work] = {}
        self._note = ""
        self._pipes = Pipes(
            store, policy=config.policy, credit_bytes=NO_LIMIT, timeout_s=config.timeout_s
        )
        #: sets the credit of each pipe
        self.limit = self._pipes.limit

    # -- sums --------------------------------------------------------------------------

    def start(self, tensor: torch.Tensor, key: str = "") -> Work:
        self.push(tensor, key)
        return self.ask(tensor, key)

    def start_largest(self, numbers: torch.Tensor) -> Work:
        """See `Wire.start_largest`: a sum of rows of which each worker has one is exact."""
        place = f"told-{numbers.numel()}"
        if (last := self._told.get(place)) is not None:
            # All workers have pushed that before anything of the round that ends now.
            self.wait(last, place)
        rows = numbers.new_zeros(self.size, numbers.numel())
        rows[self.rank] = numbers
        told = self._told[place] = Work()
        self.start(rows, place).add_done_callback(partial(_take_largest, rows, numbers, told))
        return told

    # -- pushes and pulls --------------------------------------------------------------

    def name(self, like: torch.Tensor, key: str) -> str:
        """The store's own name for a chunk, made on its first use; collective then."""
        return str(self._chunk(key, like).key)

    def push(self, tensor: torch.Tensor, key: str) -> None:
        """Begins to push ``tensor``."""
        if self._pipes.error is not None:
            raise self._pipes.error.with_traceback(None)
        self._pipes.push(self._chunk(key, tensor), tensor)

    def ask(self, tensor: torch.Tensor, key: str) -> Work:
        """The pull into ``tensor`` begins when the push of ``key`` has ended; returns the work."""
        return self._pipes.pull(self._chunks[_place_of(key)], tensor)

    def _chunk(self, key: str, like: torch.Tensor) -> Chunk:
        place = _place_of(key)
        name = f"{place} {like.dtype} {tuple(like.shape)}"
        chunk = self._chunks.get(place)
        if chunk is None or chunk.push_task.name != name:
            self.forget(place)
            task = CommTask(
                name,
                start_at=0,
                stop_at=like.numel(),
                itemsize=like.element_size(),
                priority=-int(place) if place.isdigit() else _FIRST,
            )
            chunk = self._chunks[place] = Chunk(self._made(name, like), task)
            self._pipes.add(chunk)
        return chunk

    def forget(self, key: str) -> None:
        """Gives back what the store keeps for ``key``, if it can; collective."""
        if (chunk := self._chunks.pop(_place_of(key), None)) is not None:
            self._delete(str(chunk.key))

    def _made(self, part: str, like: torch.Tensor) -> str:
        """The store's key for ``part``, made on its first use; collective then."""
        key = f"{self._name}/{part}"
        if key not in self._known:
            self.store.init(key, like)
            self._known.add(key)
        return key

    def _delete(self, key: str) -> None:
        if hasattr(self.store, "delete"):
            self.store.delete(key)
            self._known.discard(key)

    # -- what workers tell each other before they train --------------------------------

    def sum(self, tensor: torch.Tensor, key: str) -> None:
        """Sums ``tensor`` over the workers, in place; collective."""
        # A store with the same limit says first what went wrong.
        self._pipes.wait(self.start(tensor, key), "the store", key, 2 * self.timeout_s)

    def gather_text(self, key: str, text: str) -> list[str]:
        """Every worker's ``text``, by rank; collective."""
        data = text.encode()
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        self.sum(lengths, f"{key}-length")
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

    def of_leader(self, number: int) -> int:
        """The same for one number."""
        return self.leaders([number], "clock")[0]

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Gives every worker the tensors of worker 0; collective."""
        for number, tensor in enumerate(tensors):
            key = self._made(f"initial {number}", tensor)
            self.store.pull(key, tensor)
            self._delete(key)

    # -- waiting -----------------------------------------------------------------------

    def wait(self, work: Work, task: str) -> None:
        self._pipes.wait(work, "the store", task)

    def wait_left(self, works: Iterable[Work]) -> None:
        wait_for(list(works), timeout=min(_LEAVE_S, self.timeout_s))

    def stream(self) -> int:
        return HOST

    # -- figures and the end -----------------------------------------------------------

    @property
    def pulls_busy_ns(self) -> int:
        """For how long some pull was under way, since the start."""
        return self._pipes.pulls.busy_ns

    def figures(self) -> dict[str, int | float | str]:
        """What ``stats()`` says of the pipes."""
        pushes, pulls = self._pipes.pushes, self._pipes.pulls
        cpu_us = (pushes.cpu_ns + pulls.cpu_ns) / 1e3
        return {
            "order": "each worker's own",
            "scheduler_cpu_us_per_chunk": cpu_us / max(pushes.tasks_started, 1),
        }

    def leave_note(self, text: str) -> None:
        self._note = text

    def abort(self) -> None:
        if hasattr(self.store, "fail_with"):
            reason = self._note or "it has failed"
            self.store.fail_with(PeerLost(f"worker {self.rank} gave up: {reason}"))
        else:
            self.store.close()

    def close(self) -> None:
        self._pipes.close()


def _place_of(key: str) -> str:
    """Of a `Sent.key`, or of what is told: that without its size."""
    return key.partition(" ")[0]


def _take_largest(
    rows: torch.Tensor, numbers: torch.Tensor, told: Work, summed: Future[None]
) -> None:
    if (error := summed.exception()) is not None:
        told.set_exception(error)
        return
    torch.amax(rows, 0, out=numbers)
    told.set_result(None)
