"""An all-reduce in three steps: added up within the host, then between hosts, then spread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bytesched.errors import SchedulerClosed, SchedulerTimeout, TransportError

from ..groups.group import PATIENCE_S, Group

__all__ = ["PendingSum", "TwoLevelSums"]

#: Called once, on any thread, with the error that ended a sum, if one did.
Ended = Callable[[TransportError | SchedulerClosed | None], None]


class _Sum(NamedTuple):
    task: str
    flat: torch.Tensor
    #: what every rank of this host has for our slice
    parts: torch.Tensor
    works: list[Any]
    ended: Ended


class TwoLevelSums:
    """Sums over N hosts of g ranks, of which each adds up one slice of g for its host.

    A host's interface carries 2(N-1)/N of the bytes, and a ring over all ranks more than that. The
    three steps are a pipeline: each has a group and a thread of its own, and keeps the order in
    which sums were begun, which must be the same on all ranks. A slice is added up in the order of
    the ranks on a host, and then as Gloo's ring between hosts does, so all ranks get the same bits.

    Args:
        gathering: the group of this host's ranks in which slices are brought together.
        between: that of the ranks which add up this slice on their hosts.
        spreading: the ranks of this host again, for the sums.
    """

    def __init__(self, gathering: Group, between: Group, spreading: Group) -> None:
        self.groups = gathering, between, spreading
        self._gathering, self._between, self._spreading = self.groups
        self._ranks, self._place = gathering.size, gathering.rank
        self._closed = False
        #: of the sums under way, those whose last step has not ended
        self._under_way = 0
        self._lock = threading.Lock()
        self._gathered = _Step("bytesched-gathering", self._add)
        self._added = _Step("bytesched-between", self._spread)
        self._spreaded = _Step("bytesched-spreading", self._end)

    def begin(self, tensor: torch.Tensor, task: str, ended: Ended) -> None:
        """Begins to sum ``tensor``, which is dense and on the CPU, in place.

        On one thread at a time, in one order on all ranks. Raises an error of ours.
        """
        if self._closed:
            raise SchedulerClosed(f"closed before {task} was sent")
        flat = tensor.view(-1)
        mine = self._slice(flat, self._place).numel()
        parts = torch.empty(self._ranks * mine, dtype=flat.dtype, device="cpu")
        sizes = [self._slice(flat, place).numel() for place in range(self._ranks)]
        try:
            work = self._gathering.backend.alltoall_base(
                parts, flat, [mine] * self._ranks, sizes, dist.AllToAllOptions()
            )
        except RuntimeError as error:
            raise self._gathering.error(error, task=task) from error
        with self._lock:
            self._under_way += 1
        self._gathered.put(_Sum(task, flat, parts, [work], ended))

    def close(self) -> None:
        """Ends threads and connections; what is under way fails. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._under_way:
            for group in self.groups:
                group.abort()
        for step in (self._gathered, self._added, self._spreaded):
            step.close()
        for group in self.groups:
            group.close()

    def _slice(self, flat: torch.Tensor, place: int) -> torch.Tensor:
        count = flat.numel()
        return flat[count * place // self._ranks : count * (place + 1) // self._ranks]

    def _add(self, current: _Sum) -> None:
        """What this host's ranks have for our slice is here."""
        if not self._complete(self._gathering, current):
            return
        works = self._begun(self._between, current, lambda: self._added_up(current))
        if works is not None:
            self._added.put(current._replace(works=works))

    def _added_up(self, current: _Sum) -> list[Any]:
        mine = self._slice(current.flat, self._place)
        parts = current.parts.view(self._ranks, -1)
        torch.add(parts[0], parts[1], out=mine)
        for part in parts[2:]:
            mine.add_(part)
        return [self._between.all_reduce(mine)]

    def _spread(self, current: _Sum) -> None:
        """Our slice is summed over all ranks."""
        if not self._complete(self._between, current):
            return
        works = self._begun(self._spreading, current, lambda: self._broadcasts(current.flat))
        if works is not None:
            self._spreaded.put(current._replace(works=works))

    def _end(self, current: _Sum) -> None:
        """All slices are here."""
        if self._complete(self._spreading, current):
            self._ends(current, None)

    def _broadcasts(self, flat: torch.Tensor) -> list[Any]:
        works = []
        for place in range(self._ranks):
            options: Any = dist.BroadcastOptions()
            options.rootRank = place
            works.append(self._spreading.backend.broadcast([self._slice(flat, place)], options))
        return works

    def _begun(
        self, group: Group, current: _Sum, begin: Callable[[], list[Any]]
    ) -> list[Any] | None:
        try:
            return begin()
        except RuntimeError as error:
            self._failed(group, current, error)
            return None

    def _complete(self, group: Group, current: _Sum) -> bool:
        try:
            for work in current.works:
                group.complete(work)
        except RuntimeError as error:
            self._failed(group, current, error)
            return False
        return True

    def _failed(self, group: Group, current: _Sum, error: RuntimeError) -> None:
        closed = SchedulerClosed(f"closed while {current.task} was being sent")
        self._ends(current, closed if self._closed else group.error(error, task=current.task))

    def _ends(self, current: _Sum, error: TransportError | SchedulerClosed | None) -> None:
        with self._lock:
            self._under_way -= 1
        current.ended(error)

    def __repr__(self) -> str:
        return (
            f"<TwoLevelSums rank {self._place} of {self._ranks} on host {self._between.rank} of "
            f"{self._between.size}, {self._under_way} under way>"
        )


class _Step:
    """A thread that takes sums one after the other."""

    def __init__(self, name: str, take: Callable[[_Sum], None]) -> None:
        self._take = take
        self._queue: SimpleQueue[_Sum | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, current: _Sum) -> None:
        self._queue.put(current)

    def close(self) -> None:
        self._queue.put(None)
        # The collector of garbage may end a session on any thread.
        if threading.current_thread() is not self._thread:
            self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while (current := self._queue.get()) is not None:
            self._take(current)


class PendingSum:
    """A sum that is waited for.

    Args:
        timeout_s: longest wait.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._over = threading.Event()
        self._error: TransportError | SchedulerClosed | None = None

    def ended(self, error: TransportError | SchedulerClosed | None) -> None:
        """For `TwoLevelSums.begin`."""
        self._error = error
        self._over.set()

    def wait(self) -> None:
        """Returns when it has ended; raises the error that ended it."""
        if not self._over.wait(self._timeout_s):
            raise SchedulerTimeout(f"a sum in two levels took more than {self._timeout_s:g} s")
        if self._error is not None:
            raise self._error
