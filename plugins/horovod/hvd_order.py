"""One order of chunks under Horovod, which negotiates what runs: rank 0 chooses what may."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch

from bytesched.environment import HOROVOD_CACHE_CAPACITY, horovod_cache_capacity
from bytesched.order import Leading, ReadyQueue
from bytesched.policy import named_policy
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ..layout.packing import Packer
from .wire import Wire

__all__ = ["NegotiatedOrder"]

log = logging.getLogger("bytesched")

#: Ranks that do not choose announce whatever is ready.
_NO_LIMIT: Final = 1 << 62


class NegotiatedOrder:
    """Rank 0 chooses by announcing; the others announce all they have (see scheduled.Ordering).

    Horovod runs an operation when every rank has announced it, so that no other message is
    needed. Among operations that are announced at once it takes those first that it ran longest ago
    (controller.cc, ComputeResponseList): so all chunks are run once in the order of their
    priority, by the warm-up and after every new cut.

    Args:
        wire: what reduces ``chunks``, and has reduced each of them once.
        packer: knows the memory of chunks.
    """

    order = "negotiated"

    def __init__(
        self, wire: Wire, packer: Packer, chunks: Sequence[CommTask], setting: Setting
    ) -> None:
        self._wire = wire
        self._packer = packer
        self._policy = setting.policy
        #: the cuts that Horovod has seen, by the names of their chunks
        self._seen = {self._names(chunks)}
        self._scheduler: Scheduler
        if wire.rank == 0:
            _check_cache(len(chunks))

    def queue(self) -> ReadyQueue:
        return Leading(named_policy(self._policy))

    def window_bytes(self, credit_bytes: int) -> int:
        return _NO_LIMIT if self._wire.rank else credit_bytes

    def bind(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def round_ends(self) -> None:
        pass

    def change(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        self._wire.let_go()
        if (names := self._names(chunks)) not in self._seen:
            self._show(chunks)
            self._remember(names)
        if setting.policy != self._policy:
            self._policy = setting.policy
            self._scheduler.use_queue(self.queue())

    def close(self) -> None:
        pass

    def _show(self, chunks: Sequence[CommTask]) -> None:
        """Runs ``chunks`` one by one. On zeros: gradients may still be read."""
        for chunk in chunks:
            work = self._wire.reduce(chunk, torch.zeros_like(self._packer.memory(chunk)))
            self._wire.wait(work, task=chunk.name)
            self._wire.let_go()

    def _remember(self, names: tuple[str, ...]) -> None:
        # Horovod forgets what it ran longest ago. What is forgotten here is shown again.
        if sum(map(len, self._seen)) + len(names) > HOROVOD_CACHE_CAPACITY:
            self._seen.clear()
        self._seen.add(names)

    def _names(self, chunks: Sequence[CommTask]) -> tuple[str, ...]:
        return tuple(map(self._wire.chunk_name, chunks))


def _check_cache(chunks: int) -> None:
    """Warns if Horovod does not remember so many operations from one step to the next."""
    capacity = horovod_cache_capacity()
    if 0 <= capacity < chunks:
        log.warning(
            "HOROVOD_CACHE_CAPACITY = %d is less than %d chunks: Horovod negotiates them anew in "
            "every step, which takes long, and forgets their order; set it to %d or more",
            capacity,
            chunks,
            2 * chunks,
        )
