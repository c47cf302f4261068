"""Chunks on their way out: one lane for each receiver and kind of cargo."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from bytesched.errors import BytesschedError, SchedulerClosed, TransportError
from bytesched.plugins.c10d.group import Group
from bytesched.plugins.c10d.messages import Messages
from bytesched.plugins.wave.stages.routes import Cargo, Route
from bytesched.task import CommTask
from bytesched.transport import Done

__all__ = ["Senders"]


class _Sent(NamedTuple):
    """A chunk under way."""

    task: CommTask
    work: Any
    to: int
    done: Done


class Senders:
    """Sends each task's chunk to its rank, under its tag (see transport.Transport).

    Receivers take what comes in one lane in order; each lane is awaited by a thread of its own.
    A lane is one kind of cargo to one rank, apart for a stage that sets out from its home: it
    is sent before the visitors that are to be passed on, and may be taken after them.
    """

    def __init__(
        self,
        group: Group,
        messages: Messages,
        addresses: Mapping[CommTask, tuple[Route, int]],
        chunk_of: Callable[[CommTask], torch.Tensor],
    ) -> None:
        self._group = group
        self._messages = messages
        self._addresses = addresses
        self._chunk_of = chunk_of
        self._lanes: dict[tuple[Cargo, int, bool], queue.SimpleQueue[_Sent | None]] = {}
        self._threads: list[threading.Thread] = []
        self._under_way = 0
        self._lock = threading.Lock()
        self._closed = False

    def start(self, task: CommTask, done: Done) -> None:
        """See transport.Transport."""
        route, tag = self._addresses[task]
        try:
            work = self._group.backend.send([self._chunk_of(task)], route.to, tag)
        except RuntimeError as error:
            raise self._group.error(error, task=task.name) from error
        with self._lock:
            self._under_way += 1
        lane = (route.cargo, route.to, route.stage == self._group.rank)
        if lane not in self._lanes:
            self._lanes[lane] = queue.SimpleQueue()
            self._threads.append(
                threading.Thread(
                    target=self._wait, args=[self._lanes[lane]], name="bytesched-lane", daemon=True
                )
            )
            self._threads[-1].start()
        self._lanes[lane].put(_Sent(task, work, route.to, done))

    def close(self) -> None:
        """See transport.Transport."""
        if self._closed:
            return
        self._closed = True
        if self._under_way:
            self._group.abort()
        for lane in self._lanes.values():
            lane.put(None)
        for thread in self._threads:
            thread.join(5.0)

    def _wait(self, lane: queue.SimpleQueue[_Sent | None]) -> None:
        """A lane's thread."""
        while (sent := lane.get()) is not None:
            failed: BytesschedError | None = None
            try:
                self._messages.wait(sent.work, sent.to, task=sent.task.name)
            except TransportError as error:
                failed = (
                    SchedulerClosed(f"closed while {sent.task.name} was being sent")
                    if self._closed
                    else error
                )
            with self._lock:
                self._under_way -= 1
            sent.done(sent.task, failed)
