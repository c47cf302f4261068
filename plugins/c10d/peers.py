"""torch.distributed as what carries a session: groups of our own, one thread per direction."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function

from bytesched.config import Config
from bytesched.errors import BytesschedError, SchedulerClosed, SchedulerTimeout
from bytesched.plugins.c10d.group import Group
from bytesched.plugins.c10d.order import LedOrder, replayed_orders
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.session.peers import Agreement
from bytesched.plugins.session.streams import Streams
from bytesched.task import CommTask
from bytesched.transport import Done

__all__ = ["C10dPeers", "C10dTransport"]

log = logging.getLogger("bytesched")


class C10dPeers:
    """The ranks of a process group (see peers.Peers).

    Args:
        data: the group that gradients travel on.
        control: the group that the leader's order travels on.
        buffers: the group that buffers travel on, if there are any.
    """

    hides_overhead = True
    knobs = frozenset({"partition_bytes", "credit_bytes", "policy", "order"})

    def __init__(self, data: Group, control: Group, buffers: Group | None = None) -> None:
        self.rank = data.rank
        self.size = self.divisor = data.size
        self.timeout_s = data.timeout_s
        self.backend: str = data.backend.name()
        self.replayed = replayed_orders(data.size)
        self._data = data
        self._control = control
        self._groups = (data, control) if buffers is None else (data, control, buffers)

    def sum(self, tensor: torch.Tensor, key: str) -> Any:
        return self._data.backend.allreduce([tensor])

    def reduce(self, chunk: CommTask, packed: torch.Tensor) -> Any:
        return self._data.backend.allreduce([packed])

    def wait(self, work: Any, *, task: str = "") -> None:
        self._data.wait(work, task=task)

    def transport(self, packer: Packer, streams: Streams) -> C10dTransport:
        return C10dTransport(self._data, packer, streams)

    def agreement(self, chunks: Sequence[CommTask], config: Config) -> Agreement:
        return LedOrder(self._control, len(chunks), config)

    def timeout(self, message: str, story: Callable[[], str]) -> SchedulerTimeout:
        return SchedulerTimeout(
            message + self._data.note(), rank=self.rank, story=story().splitlines()
        )

    def leave_note(self, text: str) -> None:
        self._data.leave_note(text)

    def abort(self) -> None:
        for group in self._groups:
            try:
                group.abort()
            except Exception:
                log.exception("%s could not be broken", group.name)

    def close(self) -> None:
        for group in self._groups:
            group.close()


class C10dTransport:
    """Packs a chunk, all-reduces it, and reports when it is complete."""

    def __init__(self, group: Group, packer: Packer, streams: Streams) -> None:
        self._group = group
        self._packer = packer
        self._streams = streams
        self._sent: queue.SimpleQueue[tuple[CommTask, Any, Done] | None] = queue.SimpleQueue()
        #: each is counted by one thread
        self._started = self._ended = 0
        self._closed = False
        self._thread = threading.Thread(target=self._wait, name="bytesched-waiter", daemon=True)
        self._thread.start()

    def start(self, task: CommTask, done: Done) -> None:
        try:
            with self._streams.communication(task), record_function("bytesched::send"):
                work = self._group.backend.allreduce([self._packer.pack(task)])
        except RuntimeError as error:
            raise self._group.error(error, task=task.name) from error
        self._started += 1
        self._sent.put((task, work, done))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._sent.put(None)
            if self._ended != self._started:
                self._group.abort()
            self._thread.join(5.0)

    def _wait(self) -> None:
        """The waiter's thread: completions in the order of sending."""
        while (sent := self._sent.get()) is not None:
            task, work, done = sent
            try:
                with self._streams.completion(task):
                    self._group.complete(work)
                    self._packer.receive(task)
                self._packer.let_go(task)
            except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for it
                failed: BytesschedError | None = (
                    SchedulerClosed(f"closed while {task.name} was being sent")
                    if self._closed
                    else self._group.error(error, task=task.name)
                )
            else:
                failed = None
            self._ended += 1
            done(task, failed)

    def __repr__(self) -> str:
        return f"<C10dTransport rank {self._group.rank} of {self._group.size}>"
