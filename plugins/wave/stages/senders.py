"""Chunks on their way out: one lane for each receiver and kind of cargo."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from bytesched.task import CommTask
from bytesched.transport import Done

from ...routes.groups.group import Group
from ...routes.groups.messages import Messages
from ...routes.groups.waiter import Waiter
from .routes import Cargo, Route

__all__ = ["Senders"]


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
        self._lanes: dict[tuple[Cargo, int, bool], Waiter] = {}
        self._closed = False

    def start(self, task: CommTask, done: Done) -> None:
        """See transport.Transport."""
        route, tag = self._addresses[task]
        try:
            work = self._group.send(self._chunk_of(task), route.to, tag)
        except RuntimeError as error:
            raise self._group.error(error, task=task.name) from error
        kind = (route.cargo, route.to, route.stage == self._group.rank)
        if kind not in self._lanes:
            self._lanes[kind] = Waiter(self._messages, "bytesched-lane")
        self._lanes[kind].put(task, [(work, route.to)], done)

    def close(self) -> None:
        """See transport.Transport."""
        if self._closed:
            return
        self._closed = True
        for lane in self._lanes.values():
            lane.stop()
        if any(lane.is_busy for lane in self._lanes.values()):
            self._group.abort()
        for lane in self._lanes.values():
            lane.join()
