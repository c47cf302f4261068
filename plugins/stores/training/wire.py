"""A KVStore as a wire: a chunk is a key, which is pushed, and pulled when it has been."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Final

import torch

from bytesched.config import Config
from bytesched.errors import PeerLost, SchedulerTimeout
from bytesched.kvstore.pipes import Chunk, Pipes
from bytesched.task import CommTask
from bytesched.urgency import URGENCY

from ...planned.wire import HOST
from .workers import Workers

__all__ = ["StoreWire", "Work"]

#: of what ranks tell each other: before all chunks
_FIRST: Final = -(1 << 30)
#: how long what is left may take when a session ends
_LEAVE_S: Final = 5.0


class Work(Future[None]):
    """The end of a pull."""

    def is_completed(self) -> bool:
        """Whether it has come, or cannot."""
        return self.done()

    def get_future(self) -> Work:
        """What tells of it."""
        return self


class StoreWire:
    """Chunks through two pipes (see `planned.wire.Wire`).

    A store sums key by key, so that workers need no common order. What was cut last goes first
    among what is ready: the next forward pass begins with it.

    Args:
        config: with the sizes of chunks and window.
    """

    levels = 1
    sees_ends = True
    has_streams = False

    def __init__(self, workers: Workers, config: Config) -> None:
        self.rank = workers.rank
        self.size = workers.size
        self.timeout_s = workers.timeout_s
        self._workers = workers
        #: by its place in the plan, or what it tells
        self._chunks: dict[str, Chunk] = {}
        #: pulls that were asked for and have not ended
        self._asked: dict[Chunk, Work] = {}
        self._told: dict[str, Work] = {}
        self._note = ""
        #: guards the first error, which is final, and what it ends
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._pipes = Pipes(
            workers.store,
            policy=config.policy,
            credit_bytes=config.credit_bytes,
            on_pulled=self._pulled,
            on_error=self._failed,
        )

    # -- sums --------------------------------------------------------------------------

    def start(self, tensor: torch.Tensor, key: str = "") -> Work:
        """See `Wire.start`."""
        self.push(tensor, key)
        return self.ask(key)

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
        """Begins to push ``tensor``, which a pull is to fill."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        chunk = self._chunk(key, tensor)
        chunk.push_from = chunk.pull_into = tensor
        self._pipes.push(chunk)

    def ask(self, key: str) -> Work:
        """The pull of ``key`` begins when its push has ended; returns the work."""
        chunk, work = self._chunks[_place_of(key)], Work()
        with self._lock:
            error = self._error
            if error is None:
                self._asked[chunk] = work
        if error is None:
            self._pipes.ask(chunk)
        else:
            work.set_exception(error)
        return work

    def _chunk(self, key: str, like: torch.Tensor) -> Chunk:
        place = _place_of(key)
        name = f"{place} {like.dtype} {tuple(like.shape)}"
        chunk = self._chunks.get(place)
        if chunk is None or chunk.push_task.name != name:
            if chunk is not None:
                # Of buckets that are none any more.
                self._workers.delete(chunk.push_task.name)
            task = CommTask(
                name,
                start_at=0,
                stop_at=like.numel(),
                itemsize=like.element_size(),
                priority=-int(place) if place.isdigit() else _FIRST,
            )
            key = self._workers.key(name, like)
            chunk = self._chunks[place] = Chunk(key, task)
            self._pipes.add(chunk)
        return chunk

    # -- the pipes' thread -------------------------------------------------------------

    def _pulled(self, chunk: Chunk) -> None:
        # Nothing of a session stays here.
        chunk.push_from = chunk.pull_into = None
        with self._lock:
            work = self._asked.pop(chunk, None)
        if work is not None:
            work.set_result(None)

    def _failed(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            asked, self._asked = self._asked, {}
        for work in asked.values():
            work.set_exception(self._error)

    # -- waiting -----------------------------------------------------------------------

    def wait(self, work: Work, task: str) -> None:
        """See `Wire.wait`; raises whatever the store has raised."""
        if URGENCY.is_held and not work.done():
            with URGENCY.waiting():
                self._wait(work, task)
        else:
            self._wait(work, task)

    def _wait(self, work: Work, task: str) -> None:
        try:
            error = work.exception(self.timeout_s)
        except TooLate:
            raise SchedulerTimeout(
                f"waited {self.timeout_s:g} s for the store",
                task=task,
                rank=self.rank,
                story=self._pipes.story(),
            ) from None
        if error is not None:
            raise error.with_traceback(None)

    def wait_left(self, works: Iterable[Work]) -> None:
        """See `Wire.wait_left`."""
        wait_for(list(works), timeout=min(_LEAVE_S, self.timeout_s))

    def stream(self) -> int:
        """See `Wire.stream`."""
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
        """See `Wire.leave_note`."""
        self._note = text

    def abort(self) -> None:
        """See `Wire.abort`."""
        store = self._workers.store
        if hasattr(store, "fail_with"):
            reason = self._note or "it has failed"
            store.fail_with(PeerLost(f"worker {self.rank} gave up: {reason}"))
        else:
            store.close()

    def close(self) -> None:
        """See `Wire.close`."""
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
