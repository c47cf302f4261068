"""Partitions and gradients on their way: a task for every piece that this rank sends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from bytesched.core import SchedulerCore
from bytesched.errors import BytesschedError, SchedulerClosed
from bytesched.observe import Observers
from bytesched.order import Leading
from bytesched.plugins.c10d import Group
from bytesched.plugins.progress import Progress
from bytesched.plugins.wave.partition import Partition
from bytesched.plugins.wave.routes import Cargo, Route, sends, source, visits
from bytesched.policy import Priority
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask
from bytesched.transport import Done

__all__ = ["ROOMS", "Traffic"]

#: partitions on a visit: one that is computed with, and the next
ROOMS: Final = 2
#: gradients that may wait: of this rank, for the sum of those before it, and sums, to be sent
_WAITING: Final = 2
#: partitions that may wait for room at their receivers: visitors that are passed on, the rank's
#: own to two others in both directions, and sums of gradients
_HELD: Final = ROOMS + 4 + 2 * _WAITING

_WEIGHTS: Final = frozenset({Cargo.FORWARD, Cargo.BACKWARD})
_TAGS_PER_CARGO: Final = 1 << 20


class _Sent(NamedTuple):
    """A piece under way."""

    task: CommTask
    work: Any
    done: Done


class Senders:
    """Sends each task's piece to its rank (see transport.Transport).

    Receivers take what comes in one lane in order; each lane is awaited by a thread of its own.
    A lane is one kind of cargo to one rank, apart for a partition that sets out from its home: it
    is sent before the visitors that are to be passed on, and may be taken after them.
    """

    def __init__(self, group: Group, piece_of: Callable[[CommTask], torch.Tensor]) -> None:
        self._group = group
        self._piece_of = piece_of
        self.routes: dict[CommTask, tuple[Route, int]] = {}
        self._lanes: dict[tuple[Cargo, int, bool], queue.SimpleQueue[_Sent | None]] = {}
        self._threads: list[threading.Thread] = []
        self._under_way = 0
        self._lock = threading.Lock()
        self._closed = False

    def start(self, task: CommTask, done: Done) -> None:
        """See transport.Transport."""
        route, tag = self.routes[task]
        try:
            work = self._group.backend.send([self._piece_of(task)], route.to, tag)
        except RuntimeError as error:
            raise self._group.error(error, task=task.name) from error
        with self._lock:
            self._under_way += 1
        lane = (route.cargo, route.to, route.partition == self._group.rank)
        if lane not in self._lanes:
            self._lanes[lane] = queue.SimpleQueue()
            self._threads.append(
                threading.Thread(
                    target=self._wait, args=[self._lanes[lane]], name="bytesched-lane", daemon=True
                )
            )
            self._threads[-1].start()
        self._lanes[lane].put(_Sent(task, work, done))

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
                sent.work.wait()
            except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for it
                failed = (
                    SchedulerClosed(f"closed while {sent.task.name} was being sent")
                    if self._closed
                    else self._group.error(error, task=sent.task.name)
                )
            with self._lock:
                self._under_way -= 1
            sent.done(sent.task, failed)


class Traffic:
    """What one rank receives, passes on and sends home in each step.

    Args:
        partitions: all of the model, by index.
        piece_bytes: about the size of what is sent at once.
        progress: where everybody waits, and learns of errors.
    """

    def __init__(
        self,
        group: Group,
        partitions: Sequence[Partition],
        progress: Progress,
        observers: Observers,
        *,
        piece_bytes: int,
    ) -> None:
        self._group = group
        self._rank, self._ranks = group.rank, group.size
        self._partitions = partitions
        self._progress = progress
        self._home = partitions[self._rank]
        self._piece_bytes = piece_bytes
        self._transport = Senders(group, self._piece)
        #: the pieces of each route, in the order of their elements
        self._pieces: dict[Route, list[CommTask]] = {}
        self._lay_out()
        largest_bytes = max(partition.nbytes for partition in partitions)
        self._scheduler = Scheduler(
            # So much that no piece waits behind one whose receiver has no room yet.
            SchedulerCore(Leading(Priority()), credit_bytes=_HELD * largest_bytes),
            self._transport,
            on_finish=self._on_finish,
            on_error=progress.fail,
            observers=observers,
        )
        progress.story = self._scheduler.core.story
        self._receivers = ThreadPoolExecutor(2, "bytesched-receiver")
        self._under_way: list[Future[None]] = []
        # - guarded by the lock of progress
        self._rooms = ROOMS
        self._arrived: set[tuple[Cargo, int]] = set()
        self._used: set[tuple[Cargo, int]] = set()
        #: pieces still to be sent, by route
        self._left: dict[Route, int] = {}
        #: gradients of this rank that have not been added to the sum
        self._own: dict[int, torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._total: torch.Tensor | None = None
        self._coming_home: list[Any] = []
        self._live_bytes = 0
        #: the most bytes of weights and gradients that were here, the partition at home included
        self.peak_bytes = 0
        self._count(self._home.nbytes)

    def _lay_out(self) -> None:
        for priority, route in enumerate(sends(self._rank, self._ranks)):
            self._pieces[route] = self._cut(route, priority)
        tasks = [task for pieces in self._pieces.values() for task in pieces]
        for index, task in enumerate(tasks):
            task.index = index

    def _cut(self, route: Route, priority: int) -> list[CommTask]:
        flat = self._partitions[route.partition].flat
        whole = CommTask(
            f"{_name(route.cargo, route.partition)} to {route.to}",
            start_at=0,
            stop_at=flat.numel(),
            itemsize=flat.element_size(),
            priority=priority,
        )
        pieces = list(whole.partition(self._piece_bytes))
        for number, piece in enumerate(pieces):
            self._transport.routes[piece] = (route, _tag(route.cargo, route.partition, number))
        return pieces

    # -- the user's thread -------------------------------------------------------------

    def begin(self, *, train: bool) -> None:
        """A step begins: partitions set out. Without ``train``, forward only."""
        self._progress.check()
        cargoes = set(Cargo) if train else {Cargo.FORWARD}
        with self._progress.changed:
            self._arrived.clear()
            self._used.clear()
            self._left = {r: len(p) for r, p in self._pieces.items() if r.cargo in cargoes}
            self._progress.outstanding = sum(self._left.values())
            if train:
                # For the sum of all ranks' gradients; here, because receivers count as well.
                self._count(self._home.nbytes)
        coming = [visit for visit in visits(self._ranks) if visit[0] in cargoes]
        for cargo in _WEIGHTS & cargoes:
            self._ready(cargo, self._rank)
        self._under_way = [self._receivers.submit(self._guarded, self._receive_weights, coming)]
        if train:
            self._coming_home, self._total = [], None
            if self._rank != self._ranks - 1:
                # Now, so that the last rank need not keep it.
                self._total = torch.empty_like(self._home.flat)
                self._coming_home = self._post(Cargo.HOME, self._rank, self._ranks - 1, self._total)
            self._under_way.append(self._receivers.submit(self._guarded, self._pass_gradients))

    def wait_for(self, cargo: Cargo, partition: int) -> None:
        """Returns when the weights of ``partition`` are here."""
        self._progress.wait(lambda: (cargo, partition) in self._arrived, _name(cargo, partition))

    def used(self, cargo: Cargo, partition: int) -> None:
        """This rank has computed with the weights, and needs them no longer."""
        with self._progress.changed:
            self._used.add((cargo, partition))
            self._let_go(cargo, partition)
            self._progress.notify()

    def add(self, partition: int, gradients: torch.Tensor) -> None:
        """Gradients of this rank; returns when not too many of them wait for those before it."""
        with self._progress.changed:
            self._own[partition] = gradients
            self._count(gradients.nbytes)
            self._progress.notify()
        # Without a limit a rank that is faster than the others would keep a whole model of them.
        self._progress.wait(
            lambda: len(self._own) < _WAITING and len(self._sums) <= _WAITING,
            f"gradients {partition} to be summed and passed on",
        )

    def total(self) -> torch.Tensor:
        """The gradients of the partition at home, summed over all ranks."""
        self._receive(Cargo.HOME, self._rank, self._coming_home)
        self._progress.wait(lambda: self._total is not None, "the gradients of the last partition")
        assert self._total is not None
        return self._total

    def end(self) -> None:
        """Returns when nothing is under way any more."""
        self._progress.wait(lambda: not self._progress.outstanding, "what this rank sends")
        for receiving in self._under_way:
            receiving.result()
        with self._progress.changed:
            self._count(self._home.nbytes - self._live_bytes)

    @property
    def bound_bytes(self) -> int:
        """What ``peak_bytes`` cannot exceed, however fast or slow the other ranks are."""
        largest_bytes = max(partition.nbytes for partition in self._partitions)
        # At home weights and gradients; else visitors, gradients that wait, and one that arrives.
        return 2 * self._home.nbytes + (ROOMS + 2 * _WAITING + 1) * largest_bytes

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent in all."""
        return self._scheduler.bytes_started

    def close(self) -> None:
        """Ends all threads."""
        self._scheduler.close()
        self._receivers.shutdown(wait=False, cancel_futures=True)

    # -- the receivers' threads --------------------------------------------------------

    def _guarded(self, receive: Callable[..., None], *args: Any) -> None:
        try:
            receive(*args)
        except BaseException as error:  # noqa: BLE001 - the user's thread waits for it
            self._progress.fail(error)

    def _receive_weights(self, coming: Sequence[tuple[Cargo, int]]) -> None:
        for cargo, index in coming:
            partition = self._partitions[index]
            origin = source(self._rank, cargo, index, self._ranks)
            if origin is not None:
                self._progress.wait(
                    partial(self._has_room, partition), f"room for partition {index}"
                )
                with self._progress.changed:
                    self._rooms -= 1
                    self._count(partition.nbytes)
                    partition.come()
                works = self._post(cargo, index, origin, partition.flat)
                self._receive(cargo, index, works)
            with self._progress.changed:
                self._arrived.add((cargo, index))
                self._progress.notify()

    def _has_room(self, partition: Partition) -> bool:
        # It may be here still from the forward pass, in use or to be passed on.
        return self._rooms > 0 and not partition.present

    def _pass_gradients(self) -> None:
        for index in reversed(range(self._ranks)):
            partition = self._partitions[index]
            earlier: torch.Tensor | None = None
            works: list[Any] = []
            if self._rank:
                with self._progress.changed:
                    self._count(partition.nbytes)
                earlier = torch.empty_like(partition.flat)
                works = self._post(Cargo.GRADIENT, index, self._rank - 1, earlier)
            self._progress.wait(partial(self._own.__contains__, index), f"own gradients {index}")
            own = self._own[index]
            total = own if earlier is None else earlier
            stays = index == self._rank == self._ranks - 1
            if not stays:
                with self._progress.changed:
                    self._sums[index] = total
            # Piece by piece: the last gradients go through all ranks when nobody computes any more.
            for number, (start, stop) in enumerate(self._cut_like(partition)):
                if earlier is not None:
                    self._group.wait_message(works[number], task=_name(Cargo.GRADIENT, index))
                    earlier[start:stop] += own[start:stop]
                self._ready(Cargo.GRADIENT, index, number)
                self._ready(Cargo.HOME, index, number)
            with self._progress.changed:
                del self._own[index]
                if earlier is not None:
                    self._count(-own.nbytes)
                if stays:
                    self._total = total
                    self._count(-total.nbytes)
                self._progress.notify()

    def _post(self, cargo: Cargo, index: int, origin: int, flat: torch.Tensor) -> list[Any]:
        """Begins to receive into ``flat``, piece by piece."""
        try:
            return [
                self._group.backend.recv([flat[start:stop]], origin, _tag(cargo, index, number))
                for number, (start, stop) in enumerate(self._cut_like(self._partitions[index]))
            ]
        except RuntimeError as error:
            raise self._group.error(error, task=_name(cargo, index)) from error

    def _receive(self, cargo: Cargo, index: int, works: Sequence[Any]) -> None:
        """Waits for what was begun; weights are passed on, each piece as soon as it is here."""
        for number, work in enumerate(works):
            self._group.wait_message(work, task=_name(cargo, index))
            if cargo in _WEIGHTS:
                self._ready(cargo, index, number)

    # -- pieces ------------------------------------------------------------------------

    def _cut_like(self, partition: Partition) -> list[tuple[int, int]]:
        """The pieces that every rank cuts ``partition`` into."""
        flat = partition.flat
        whole = CommTask("", start_at=0, stop_at=flat.numel(), itemsize=flat.element_size())
        return [(piece.start_at, piece.stop_at) for piece in whole.partition(self._piece_bytes)]

    def _piece(self, task: CommTask) -> torch.Tensor:
        route, _ = self._transport.routes[task]
        if route.cargo in _WEIGHTS:
            flat = self._partitions[route.partition].flat
        else:
            flat = self._sums[route.partition]
        return flat[task.start_at : task.stop_at]

    def _ready(self, cargo: Cargo, index: int, number: int | None = None) -> None:
        """What is to be sent of this cargo can be: all of it, or one piece."""
        for route, pieces in self._pieces.items():
            if route[:2] == (cargo, index):
                for piece in pieces if number is None else pieces[number : number + 1]:
                    piece.notify_ready()
                    self._scheduler.notify_ready(piece)

    def _on_finish(self, task: CommTask) -> None:
        """The scheduler's thread."""
        route, _ = self._transport.routes[task]
        with self._progress.changed:
            self._left[route] -= 1
            if not self._left[route]:
                if route.cargo in _WEIGHTS:
                    self._let_go(route.cargo, route.partition)
                else:
                    self._count(-self._sums.pop(route.partition).nbytes)
            self._progress.outstanding -= 1
            self._progress.notify()

    def _let_go(self, cargo: Cargo, index: int) -> None:
        """A visitor leaves when it was used here and has been passed on. With the lock held."""
        partition = self._partitions[index]
        cargoes = {cargo}
        if index == self._ranks - 1 and any(r.cargo is Cargo.GRADIENT for r in self._left):
            # It stays from forward to backward.
            cargo, cargoes = Cargo.BACKWARD, set(_WEIGHTS)
        if partition.is_home or (cargo, index) not in self._used:
            return
        if any(
            left and r.partition == index and r.cargo in cargoes for r, left in self._left.items()
        ):
            return
        partition.leave()
        self._rooms += 1
        self._count(-partition.nbytes)

    def _count(self, nbytes: int) -> None:
        self._live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)


def _name(cargo: Cargo, index: int) -> str:
    return f"{cargo.name.lower()} {index}"


def _tag(cargo: Cargo, index: int, number: int) -> int:
    return (index * len(Cargo) + cargo.value) * _TAGS_PER_CARGO + number + 1
