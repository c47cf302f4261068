"""Stages and gradients on their way: a task for every chunk that this rank sends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from bytesched.core import SchedulerCore
from bytesched.observe import Observers
from bytesched.order import Leading
from bytesched.policy import Priority
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask

from ...dependency.progress import Progress
from ...routes.groups.group import Group
from ...routes.groups.messages import Messages
from .chunks import Chunks, name_of, tag_of
from .rooms import ROOMS, WAITING, Rooms
from .routes import WEIGHTS, Cargo, Route, source, visits
from .senders import Senders
from .stage import Stage

__all__ = ["Traffic"]

#: stages that may wait for room at their receivers: visitors that are passed on, the rank's
#: own to two others in both directions, and sums of gradients
_HELD: Final = ROOMS + 4 + 2 * WAITING


class Traffic:
    """What one rank receives, passes on and sends home in each step.

    Args:
        stages: all of the model, by index.
        chunk_bytes: about the size of what is sent at once.
        progress: what all threads wait by, and where errors are kept.
    """

    def __init__(
        self,
        group: Group,
        stages: Sequence[Stage],
        progress: Progress,
        observers: Observers,
        *,
        chunk_bytes: int,
    ) -> None:
        self._group = group
        self._rank, self._ranks = group.rank, group.size
        self._stages = stages
        self._progress = progress
        self._home = stages[self._rank]
        self._messages = Messages(group)
        progress.look = self._messages.lost
        self._chunks = Chunks(stages, self._rank, self._ranks, chunk_bytes)
        largest_bytes = max(stage.nbytes for stage in stages)
        self._scheduler = Scheduler(
            # So much that no chunk waits behind one whose receiver has no room yet.
            SchedulerCore(Leading(Priority()), credit_bytes=_HELD * largest_bytes),
            Senders(group, self._messages, self._chunks.addresses, self._chunk),
            on_finish=self._on_finish,
            on_error=progress.fail,
            observers=observers,
        )
        progress.story = self._scheduler.core.story
        # - guarded by the lock of progress
        self.rooms = Rooms(stages, self._rank)
        self._arrived: set[tuple[Cargo, int]] = set()
        #: threads that receive
        self._receiving = 0
        #: chunks still to be sent, by route
        self._left: dict[Route, int] = {}
        #: gradients of this rank that have not been added to the sum
        self._own: dict[int, torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._total: torch.Tensor | None = None

    # -- the user's thread -------------------------------------------------------------

    def begin(self, *, train: bool) -> None:
        """A step begins: stages set out. Without ``train``, forward only."""
        self._progress.check()
        cargoes = set(Cargo) if train else {Cargo.FORWARD}
        with self._progress.lock:
            self._arrived.clear()
            self.rooms.begin(train=train)
            chunks = self._chunks.by_route
            self._left = {r: len(p) for r, p in chunks.items() if r.cargo in cargoes}
        coming = [visit for visit in visits(self._ranks) if visit[0] in cargoes]
        for cargo in WEIGHTS & cargoes:
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

    def wait_for(self, cargo: Cargo, stage: int) -> None:
        """Returns when the weights of ``stage`` are here."""
        self._progress.wait(lambda: (cargo, stage) in self._arrived, name_of(cargo, stage))

    def used(self, cargo: Cargo, stage: int) -> None:
        """This rank has computed with the weights, and needs them no longer."""
        with self._progress.lock:
            self.rooms.used(cargo, stage, self._left)
            self._progress.notify()

    def add(self, stage: int, gradients: torch.Tensor) -> None:
        """Gradients of this rank; returns when not too many of them wait for those before it."""
        with self._progress.lock:
            self._own[stage] = gradients
            self.rooms.count(gradients.nbytes)
            self._progress.notify()
        # Without a limit a rank that is faster than the others would keep a whole model of them.
        self._progress.wait(
            lambda: len(self._own) < WAITING and len(self._sums) <= WAITING,
            f"gradients {stage} to be summed and passed on",
        )

    def total(self) -> torch.Tensor:
        """The gradients of the stage at home, summed over all ranks."""
        self._progress.wait(
            lambda: self._total is not None,
            f"the gradients of stage {self._rank}, summed over all ranks",
        )
        assert self._total is not None
        return self._total

    def end(self) -> None:
        """Returns when nothing is under way any more."""
        self._progress.wait(
            lambda: not any(self._left.values()) and not self._receiving,
            "what this rank sends and receives",
        )
        with self._progress.lock:
            self.rooms.end()

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
                with self._progress.lock:
                    self._receiving -= 1
                    self._progress.notify()

        with self._progress.lock:
            self._receiving += 1
        # A daemon: the interpreter does not wait for a message that never comes.
        threading.Thread(target=run, name="bytesched-receiver", daemon=True).start()

    def _receive_weights(self, coming: Sequence[tuple[Cargo, int]]) -> None:
        for cargo, index in coming:
            stage = self._stages[index]
            origin = source(self._rank, cargo, index, self._ranks)
            if origin is not None:
                self._progress.wait(partial(self.rooms.has_room, stage), f"room for stage {index}")
                with self._progress.lock:
                    self.rooms.come(stage)
                works = self._post(cargo, index, origin, stage.flat)
                self._receive(cargo, index, origin, works)
            with self._progress.lock:
                self._arrived.add((cargo, index))
                self._progress.notify()

    def _receive_total(self, works: Sequence[Any], total: torch.Tensor) -> None:
        self._receive(Cargo.HOME, self._rank, self._ranks - 1, works)
        with self._progress.lock:
            self._total = total
            self._progress.notify()

    def _pass_gradients(self) -> None:
        for index in reversed(range(self._ranks)):
            stage = self._stages[index]
            earlier: torch.Tensor | None = None
            works: list[Any] = []
            if self._rank:
                with self._progress.lock:
                    self.rooms.count(stage.nbytes)
                earlier = torch.empty_like(stage.flat)
                works = self._post(Cargo.GRADIENT, index, self._rank - 1, earlier)
            self._progress.wait(partial(self._own.__contains__, index), f"own gradients {index}")
            own = self._own[index]
            total = own if earlier is None else earlier
            stays = index == self._rank == self._ranks - 1
            if not stays:
                with self._progress.lock:
                    self._sums[index] = total
            # By chunk: the last gradients go through all ranks when no rank computes any more.
            for number, (start, stop) in enumerate(self._chunks.bounds(index)):
                if earlier is not None:
                    task = name_of(Cargo.GRADIENT, index)
                    self._messages.wait(works[number], self._rank - 1, task=task)
                    earlier[start:stop] += own[start:stop]
                self._ready(Cargo.GRADIENT, index, number)
                self._ready(Cargo.HOME, index, number)
            with self._progress.lock:
                del self._own[index]
                if earlier is not None:
                    self.rooms.count(-own.nbytes)
                if stays:
                    self._total = total
                    self.rooms.count(-total.nbytes)
                self._progress.notify()

    def _post(self, cargo: Cargo, index: int, origin: int, flat: torch.Tensor) -> list[Any]:
        """Begins to receive into ``flat``, chunk by chunk."""
        try:
            return [
                self._group.receive(flat[start:stop], origin, tag_of(cargo, index, number))
                for number, (start, stop) in enumerate(self._chunks.bounds(index))
            ]
        except RuntimeError as error:
            raise self._group.error(error, task=name_of(cargo, index)) from error

    def _receive(self, cargo: Cargo, index: int, origin: int, works: Sequence[Any]) -> None:
        """Waits for what was begun; weights are passed on, each chunk as soon as it is here."""
        for number, work in enumerate(works):
            self._messages.wait(work, origin, task=name_of(cargo, index))
            if cargo in WEIGHTS:
                self._ready(cargo, index, number)

    # -- chunks ------------------------------------------------------------------------

    def _chunk(self, task: CommTask) -> torch.Tensor:
        route, _ = self._chunks.addresses[task]
        is_weights = route.cargo in WEIGHTS
        flat = self._stages[route.stage].flat if is_weights else self._sums[route.stage]
        return flat[task.start_at : task.stop_at]

    def _ready(self, cargo: Cargo, index: int, number: int | None = None) -> None:
        """What is to be sent of this cargo can be: all of it, or one chunk."""
        for chunk in self._chunks.of(cargo, index, number):
            chunk.notify_ready()
            self._scheduler.notify_ready(chunk)

    def _on_finish(self, task: CommTask) -> None:
        """The scheduler's thread."""
        route, _ = self._chunks.addresses[task]
        with self._progress.lock:
            self._left[route] -= 1
            if not self._left[route]:
                if route.cargo in WEIGHTS:
                    self.rooms.release(route.cargo, route.stage, self._left)
                else:
                    self.rooms.count(-self._sums.pop(route.stage).nbytes)
            self._progress.notify()
