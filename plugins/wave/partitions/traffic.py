"""Partitions and gradients on their way: a task for every piece that this rank sends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from bytesched.core import SchedulerCore
from bytesched.observe import Observers
from bytesched.order import Leading
from bytesched.plugins.c10d.group import Group
from bytesched.plugins.c10d.messages import Messages
from bytesched.plugins.session.progress import Progress
from bytesched.plugins.wave.partitions.partition import Partition
from bytesched.plugins.wave.partitions.pieces import Pieces, name_of, tag_of
from bytesched.plugins.wave.partitions.routes import Cargo, Route, source, visits
from bytesched.plugins.wave.partitions.senders import Senders
from bytesched.policy import Priority
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask

__all__ = ["ROOMS", "Traffic"]

#: partitions on a visit: one that is computed with, and the next
ROOMS: Final = 2
#: gradients that may wait: of this rank, for the sum of those before it, and sums, to be sent
_WAITING: Final = 2
#: partitions that may wait for room at their receivers: visitors that are passed on, the rank's
#: own to two others in both directions, and sums of gradients
_HELD: Final = ROOMS + 4 + 2 * _WAITING

_WEIGHTS: Final = frozenset({Cargo.FORWARD, Cargo.BACKWARD})


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
        self._messages = Messages(group)
        progress.look = self._messages.lost
        self._pieces = Pieces(partitions, self._rank, self._ranks, piece_bytes)
        largest_bytes = max(partition.nbytes for partition in partitions)
        self._scheduler = Scheduler(
            # So much that no piece waits behind one whose receiver has no room yet.
            SchedulerCore(Leading(Priority()), credit_bytes=_HELD * largest_bytes),
            Senders(group, self._messages, self._pieces.addresses, self._piece),
            on_finish=self._on_finish,
            on_error=progress.fail,
            observers=observers,
        )
        progress.story = self._scheduler.core.story
        # - guarded by the lock of progress
        self._rooms = ROOMS
        self._arrived: set[tuple[Cargo, int]] = set()
        self._used: set[tuple[Cargo, int]] = set()
        #: threads that receive
        self._receiving = 0
        #: pieces still to be sent, by route
        self._left: dict[Route, int] = {}
        #: gradients of this rank that have not been added to the sum
        self._own: dict[int, torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._total: torch.Tensor | None = None
        self._live_bytes = 0
        #: the most bytes of weights and gradients that were here, the partition at home included
        self.peak_bytes = 0
        self._count(self._home.nbytes)

    # -- the user's thread -------------------------------------------------------------

    def begin(self, *, train: bool) -> None:
        """A step begins: partitions set out. Without ``train``, forward only."""
        self._progress.check()
        cargoes = set(Cargo) if train else {Cargo.FORWARD}
        with self._progress.changed:
            self._arrived.clear()
            self._used.clear()
            pieces = self._pieces.by_route
            self._left = {r: len(p) for r, p in pieces.items() if r.cargo in cargoes}
            self._progress.outstanding = sum(self._left.values())
            if train:
                # For the sum of all ranks' gradients; here, because receivers count as well.
                self._count(self._home.nbytes)
        coming = [visit for visit in visits(self._ranks) if visit[0] in cargoes]
        for cargo in _WEIGHTS & cargoes:
            self._ready(cargo, self._rank)
        self._receive_beside(self._receive_weights, coming)
        if train:
            self._total = None
            if self._rank != self._ranks - 1:
                # Now, so that the last rank need not keep it.
                total = torch.empty_like(self._home.flat)
                works = self._post(Cargo.HOME, self._rank, self._ranks - 1, total)
                self._receive_beside(self._receive_total, works, total)
            self._receive_beside(self._pass_gradients)

    def wait_for(self, cargo: Cargo, partition: int) -> None:
        """Returns when the weights of ``partition`` are here."""
        self._progress.wait(lambda: (cargo, partition) in self._arrived, name_of(cargo, partition))

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
        self._progress.wait(
            lambda: self._total is not None,
            f"the gradients of partition {self._rank}, summed over all ranks",
        )
        assert self._total is not None
        return self._total

    def end(self) -> None:
        """Returns when nothing is under way any more."""
        self._progress.wait(
            lambda: not self._progress.outstanding and not self._receiving,
            "what this rank sends and receives",
        )
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
        """Ends all threads, but those that an error has left waiting for a message."""
        self._scheduler.close()

    # -- the receivers' threads --------------------------------------------------------

    def _receive_beside(self, receive: Callable[..., None], *args: Any) -> None:
        """Receives on a thread of its own, for one step."""

        def run() -> None:
            try:
                receive(*args)
            except BaseException as error:  # noqa: BLE001 - the user's thread waits for it
                self._progress.fail(error)
            finally:
                with self._progress.changed:
                    self._receiving -= 1
                    self._progress.notify()

        with self._progress.changed:
            self._receiving += 1
        # A daemon: the interpreter does not wait for a message that never comes.
        threading.Thread(target=run, name="bytesched-receiver", daemon=True).start()

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
                self._receive(cargo, index, origin, works)
            with self._progress.changed:
                self._arrived.add((cargo, index))
                self._progress.notify()

    def _receive_total(self, works: Sequence[Any], total: torch.Tensor) -> None:
        self._receive(Cargo.HOME, self._rank, self._ranks - 1, works)
        with self._progress.changed:
            self._total = total
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
            for number, (start, stop) in enumerate(self._pieces.bounds(index)):
                if earlier is not None:
                    task = name_of(Cargo.GRADIENT, index)
                    self._messages.wait(works[number], self._rank - 1, task=task)
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
                self._group.backend.recv([flat[start:stop]], origin, tag_of(cargo, index, number))
                for number, (start, stop) in enumerate(self._pieces.bounds(index))
            ]
        except RuntimeError as error:
            raise self._group.error(error, task=name_of(cargo, index)) from error

    def _receive(self, cargo: Cargo, index: int, origin: int, works: Sequence[Any]) -> None:
        """Waits for what was begun; weights are passed on, each piece as soon as it is here."""
        for number, work in enumerate(works):
            self._messages.wait(work, origin, task=name_of(cargo, index))
            if cargo in _WEIGHTS:
                self._ready(cargo, index, number)

    # -- pieces ------------------------------------------------------------------------

    def _piece(self, task: CommTask) -> torch.Tensor:
        route, _ = self._pieces.addresses[task]
        if route.cargo in _WEIGHTS:
            flat = self._partitions[route.partition].flat
        else:
            flat = self._sums[route.partition]
        return flat[task.start_at : task.stop_at]

    def _ready(self, cargo: Cargo, index: int, number: int | None = None) -> None:
        """What is to be sent of this cargo can be: all of it, or one piece."""
        for piece in self._pieces.of(cargo, index, number):
            piece.notify_ready()
            self._scheduler.notify_ready(piece)

    def _on_finish(self, task: CommTask) -> None:
        """The scheduler's thread."""
        route, _ = self._pieces.addresses[task]
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
