"""Chunks through a process group, and a thread that awaits their ends."""

from __future__ import annotations

import queue
import threading
from typing import Any

from bytesched.errors import BytesschedError, SchedulerClosed
from bytesched.task import CommTask
from bytesched.transport import Done

from ...layout.packing import Packer
from ...proxies.spans import span
from ..levels.sums import TwoLevelSums
from ..streams import Streams
from .group import Group

__all__ = ["C10dTransport"]


class C10dTransport:
    """Packs a chunk, all-reduces it, and reports when it is complete.

    Args:
        levels: what sums over all ranks in place of ``group``, if something does.
    """

    def __init__(
        self, group: Group, packer: Packer, streams: Streams, levels: TwoLevelSums | None = None
    ) -> None:
        self._group = group
        self._packer = packer
        self._streams = streams
        self._levels = levels
        self._sent: queue.SimpleQueue[tuple[CommTask, Any, Done] | None] = queue.SimpleQueue()
        #: each is counted by one thread at a time
        self._started = self._ended = 0
        self._closed = False
        self._thread = threading.Thread(target=self._wait, name="bytesched-waiter", daemon=True)
        self._thread.start()

    def start(self, task: CommTask, done: Done) -> None:
        try:
            with self._streams.communication(task), span("bytesched::send"):
                summing = self._group.all_reduce if self._levels is None else self._levels.start
                work = summing(self._packer.pack(task))
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
                if self._levels is not None:
                    self._levels.abort()
            # The collector of garbage may end a session on any thread.
            if threading.current_thread() is not self._thread:
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
            except Exception as error:  # noqa: BLE001 - whatever it is, it is waited for
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
