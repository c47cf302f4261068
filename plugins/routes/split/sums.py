"""Phase one at an owner: what the other ranks send of each chunk, received and added up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import torch

from bytesched.errors import BytesschedError, SchedulerClosed
from bytesched.task import CommTask
from bytesched.transport import Done

from ...layout.packing import Packer
from ..groups.group import PATIENCE_S, Group
from ..groups.messages import Messages

__all__ = ["Sums"]

#: What a rank receives ahead of its own gradients, from all others together; and at least so many
#: chunks of each: the next two come while one is added up.
_AHEAD_BYTES: Final = 16 << 20
_AHEAD_CHUNKS: Final = 3


class _Receiving(NamedTuple):
    """The messages of one chunk, by rank; None for this one."""

    memory: list[torch.Tensor | None]
    works: list[Any]


class Sums:
    """Adds up the chunks that this rank owns, in the order of the ranks (see transport.Transport).

    The same bits wherever chunks are cut. All ranks send chunks to an owner in one order, so that
    it needs memory for the next few of them alone.

    Args:
        receive: begins to receive a chunk from a rank into memory.
        chunks: those that are owned here, in that order.
    """

    def __init__(
        self,
        group: Group,
        messages: Messages,
        packer: Packer,
        chunks: Sequence[CommTask],
        receive: Callable[[torch.Tensor, int, CommTask], Any],
    ) -> None:
        self._group = group
        self._messages = messages
        self._packer = packer
        self._chunks = chunks
        self._receive = receive
        self._peers = group.size - 1
        largest_bytes = max((packer.memory(chunk).nbytes for chunk in chunks), default=0)
        self._ahead_bytes = max(_AHEAD_BYTES // max(self._peers, 1), _AHEAD_CHUNKS * largest_bytes)
        self._largest: dict[torch.dtype, int] = {}
        for chunk in chunks:
            memory = packer.memory(chunk)
            self._largest[memory.dtype] = max(self._largest.get(memory.dtype, 0), memory.numel())
        #: memory that nothing is received into
        self._free: dict[torch.dtype, list[torch.Tensor]] = {dtype: [] for dtype in self._largest}
        #: of this round: chunks that are not received yet, and what is on its way of the next ones
        self._to_receive: deque[CommTask] = deque()
        self._receiving: dict[int, _Receiving] = {}
        self._receiving_bytes = 0
        self._broken: RuntimeError | None = None
        self._closed = False
        self._queue: SimpleQueue[tuple[CommTask, Done] | _Round | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bytesched-sums", daemon=True)
        self._thread.start()

    def use_order(self, chunks: Sequence[CommTask]) -> None:
        """The same chunks come in this order from the next round on; none is under way."""
        self._chunks = chunks

    def begin_round(self) -> None:
        """The other ranks may send from now on."""
        self._queue.put(_ROUND)

    def start(self, task: CommTask, done: Done) -> None:
        """Adds up ``task``, whose gradients of this rank are there."""
        self._queue.put((task, done))

    def close(self) -> None:
        """Ends the thread, whose waits have been broken if there are any. Idempotent."""
        self._closed = True
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(PATIENCE_S)
        # What refers to this may live on for a while; its memory need not.
        self._free.clear()

    # -- the thread --------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Round):
                self._begin()
                continue
            chunk, done = item
            error: BaseException | None = None
            try:
                if self._broken is not None:
                    raise self._broken
                self._add_up(chunk)
                self._receive_ahead()
            except (BytesschedError, RuntimeError) as raised:
                error = self._ended_by(raised, chunk)
            done(chunk, error)

    def _begin(self) -> None:
        self._to_receive.extend(self._chunks)
        try:
            self._receive_ahead()
        except RuntimeError as error:
            # It is the error of the first chunk that is waited for.
            self._broken = error

    def _ended_by(self, raised: Exception, chunk: CommTask) -> BytesschedError:
        if self._closed:
            return SchedulerClosed(f"closed while {chunk.name} was being summed")
        if isinstance(raised, BytesschedError):
            return raised
        return self._group.error(raised, task=chunk.name)

    def _receive_ahead(self) -> None:
        """Begins to receive the next chunks, as far as there is memory for them."""
        while self._to_receive and self._receiving_bytes < self._ahead_bytes:
            chunk = self._to_receive.popleft()
            memory: list[torch.Tensor | None] = [None] * self._group.size
            works: list[Any] = [None] * self._group.size
            for rank in range(self._group.size):
                if rank != self._group.rank:
                    memory[rank] = part = self._taken(chunk)
                    works[rank] = self._receive(part, rank, chunk)
            self._receiving[chunk.index] = _Receiving(memory, works)
            self._receiving_bytes += self._held_bytes(chunk)

    def _held_bytes(self, chunk: CommTask) -> int:
        """What each rank's part of it takes here, which is as much for every chunk."""
        like = self._packer.memory(chunk)
        return self._largest[like.dtype] * like.element_size()

    def _taken(self, chunk: CommTask) -> torch.Tensor:
        like = self._packer.memory(chunk)
        free = self._free[like.dtype]
        whole = free.pop() if free else like.new_empty(self._largest[like.dtype])
        return whole[: like.numel()]

    def _add_up(self, chunk: CommTask) -> None:
        receiving = self._receiving.pop(chunk.index)
        for rank, work in enumerate(receiving.works):
            if work is not None:
                self._messages.wait(work, rank, task=chunk.name)
        self.add(chunk, receiving.memory)
        for part in receiving.memory:
            if part is not None:
                whole = part.as_strided((self._largest[part.dtype],), (1,))
                self._free[part.dtype].append(whole)
        self._receiving_bytes -= self._held_bytes(chunk)

    def add(self, chunk: CommTask, received: Sequence[torch.Tensor | None]) -> None:
        """Puts the sum of ``chunk`` into the arena, from what the other ranks have for it."""
        own = self._packer.pack(chunk)
        parts = [own if part is None else part for part in received]
        total = parts[0]
        for part in parts[1:-1]:
            total = total.add_(part) if total is not own else torch.add(total, part)
        torch.add(total, parts[-1], out=own)
        # Norms are taken of it while it is being sent.
        self._packer.receive(chunk)

    def __repr__(self) -> str:
        return f"<Sums of {len(self._chunks)} chunks, {len(self._receiving)} being received>"


class _Round:
    """A round begins."""


_ROUND: Final = _Round()
