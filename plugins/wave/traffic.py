"""Stages and gradients on their way, in chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import torch

from bytesched.observe import Observers

from ..failures import Progress
from ..routes.group import Group
from ..routes.messages import Messages, Waiter
from .stage import WAITING, WEIGHTS, Cargo, Rooms, Route, Stage, sends, source, visits


class Traffic:
    """What one rank receives, passes on and sends home in each step."""

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
        self._observers = observers
        self._home = stages[self._rank]
        self._messages = Messages(group)
        progress.look = self._messages.lost
        progress.story = self._story
        #: of each stage, the elements of its chunks
        self._bounds = [_bounds(stage, chunk_bytes) for stage in stages]
        self._routes = sends(self._rank, self._ranks)
        #: Threads that wait for what is sent, by `_lane_of`.
        self._lanes = {
            kind: Waiter(self._messages, "bytesched-lane", progress.fail)
            for kind in dict.fromkeys(map(self._lane_of, self._routes))
        }
        # - guarded by the lock of progress
        #: what this rank has sent in all
        self.sent_bytes = 0
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
            self._left = {r: len(self._bounds[r.stage]) for r in self._routes if r.cargo in cargoes}
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
        self._progress.wait(lambda: (cargo, stage) in self._arrived, cargo.of(stage))

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

    def close(self) -> None:
        """Ends all threads, but those that an error has left waiting for a message."""
        lanes = self._lanes.values()
        for lane in lanes:
            lane.stop()
        if any(lane.is_busy for lane in lanes):
            self._group.abort()
        for lane in lanes:
            lane.join()

    def _story(self) -> str:
        """What is still to be sent, for the message of a timeout."""
        return "\n".join(
            f"{count} chunks of {cargo.of(stage)} have not ended at rank {to}"
            for (cargo, stage, to), count in self._left.items()
            if count
        )

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
            for number, (start, stop) in enumerate(self._bounds[index]):
                if earlier is not None:
                    task = Cargo.GRADIENT.of(index)
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
                self._group.receive(flat[start:stop], origin, cargo.tag(index, number))
                for number, (start, stop) in enumerate(self._bounds[index])
            ]
        except RuntimeError as error:
            raise self._group.error(error, task=cargo.of(index)) from error

    def _receive(self, cargo: Cargo, index: int, origin: int, works: Sequence[Any]) -> None:
        """Waits for what was begun; weights are passed on, each chunk as soon as it is here."""
        for number, work in enumerate(works):
            self._messages.wait(work, origin, task=cargo.of(index))
            if cargo in WEIGHTS:
                self._ready(cargo, index, number)

    # -- chunks ------------------------------------------------------------------------

    def _lane_of(self, route: Route) -> tuple[Cargo, int, bool]:
        """Which lane a route is in: receivers take what comes in one in order.

        A lane is one kind of cargo to one rank, apart for a stage that sets out from its home: it
        is sent before the visitors that are to be passed on, and may be taken after them.
        """
        return route.cargo, route.to, route.stage == self._rank

    def _ready(self, cargo: Cargo, index: int, number: int | None = None) -> None:
        """Sends this cargo to whom it is for: all of it, or one chunk."""
        for route in self._routes:
            if route[:2] == (cargo, index):
                count = len(self._bounds[index])
                for each in range(count) if number is None else (number,):
                    self._send(route, each)

    def _send(self, route: Route, number: int) -> None:
        start, stop = self._bounds[route.stage][number]
        is_weights = route.cargo in WEIGHTS
        flat = self._stages[route.stage].flat if is_weights else self._sums[route.stage]
        chunk, tag = flat[start:stop], route.cargo.tag(route.stage, number)
        name = f"{route.cargo.of(route.stage)} to {route.to}" + (f"[{start}:]" if start else "")
        began_ns = perf_counter_ns()
        try:
            work = self._group.send(chunk, route.to, tag)
        except RuntimeError as error:
            raise self._group.error(error, task=name) from error
        with self._progress.lock:
            self.sent_bytes += chunk.nbytes
        args = {"bytes": chunk.nbytes, "chunk": tag}
        ended = partial(self._sent, route, name, began_ns, args)
        self._lanes[self._lane_of(route)].put(name, [(work, route.to)], ended)

    def _sent(self, route: Route, name: str, began_ns: int, args: dict[str, Any]) -> None:
        """The thread of the lane."""
        if self._observers:
            self._observers.on_span("send", name, began_ns, perf_counter_ns(), args)
        with self._progress.lock:
            self._left[route] -= 1
            if not self._left[route]:
                if route.cargo in WEIGHTS:
                    self.rooms.release(route.cargo, route.stage, self._left)
                else:
                    self.rooms.count(-self._sums.pop(route.stage).nbytes)
            self._progress.notify()


def _bounds(stage: Stage, chunk_bytes: int) -> list[tuple[int, int]]:
    """The elements of a stage, or of its gradients, in chunks of about one size."""
    numel = stage.flat.numel()
    count = min(numel, max(1, round(stage.nbytes / chunk_bytes)))
    return list(pairwise(numel * number // count for number in range(count + 1)))
