"""An iteration with layers of experts: a chain that waits for all-to-alls beside gradients.

One rank stands for all of them: they are alike, and none waits for another's word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from bytesched.bench.profile import LayerProfile
from bytesched.bench.systems import EXCHANGE_PIECES, System
from bytesched.bench.table import percentile
from bytesched.core import SchedulerCore
from bytesched.link.bound import exchanging_optimum_s
from bytesched.link.cluster import Job, Work
from bytesched.link.fabric import Fabric
from bytesched.link.shared import SharedLink
from bytesched.link.simulation import ManualClock
from bytesched.order import Leading
from bytesched.policy import named_policy
from bytesched.sim.predict import Prediction
from bytesched.sim.systems import Model, buckets, scheduled
from bytesched.task import CommTask

__all__ = ["FORMS", "Exchanging", "predict_exchanging"]

#: collectives of one group that Gloo has under way at a time: its threads
_GROUP_SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a system carries all-to-alls."""

    #: behind the gradients that were handed to the same group before, else beside them
    is_queued: bool = False
    #: whether no gradients start meanwhile
    is_urgent: bool = False
    pieces: int = 1


FORMS = {
    "ddp": Form(is_queued=True),
    "ddp-own-group": Form(),
    "bytesched-no-lane": Form(),
    "bytesched": Form(is_urgent=True),
    "bytesched-pieces": Form(is_urgent=True, pieces=EXCHANGE_PIECES),
    "idle": Form(),
}


class Exchanging:
    """One iteration of ``work`` with the all-to-alls of ``layers``, from backward to backward."""

    def __init__(
        self, work: Work, layers: Sequence[LayerProfile], fabric: Fabric, form: Form
    ) -> None:
        self._work, self._layers, self._fabric, self._form = work, layers, fabric, form
        self._clock = ManualClock()
        self._link = SharedLink(self._clock)
        self._tasks = [_task(index, job) for index, job in enumerate(work.jobs)]
        # Where nothing is planned, all is handed over at once.
        everything = 1 + sum(job.nbytes for job in work.jobs)
        largest = max((job.nbytes for job in work.jobs), default=0)
        planned = work.credit_bytes or max(1, _GROUP_SLOTS * largest)
        self._core = SchedulerCore(
            Leading(named_policy(work.policy)),
            credit_bytes=planned if work.is_planned else everything,
        )
        #: of a group that carries everything in the order in which it was handed over
        self._queue: deque[tuple[float, float, Callable[[], object]]] = deque()
        self._under_way = 0
        self._missing = [len(bundle.jobs) for bundle in work.bundles]
        self._updated = [False] * len(work.bundles)
        self._stepped = False
        self._waits_for = -1
        self._chain = self._stretches()
        #: seconds of each all-to-all, or piece of one
        self.exchanges_s: list[float] = []
        self.iteration_s = 0.0

    def run(self) -> Exchanging:
        """Itself, with its times."""
        self._go_on()
        self._clock.run()
        return self

    def _stretches(self) -> Iterator[Callable[[], None]]:
        """What the chain does, one after the other: each calls `_go_on` when it is over."""
        work = self._work
        for index in reversed(range(len(self._layers))):
            yield partial(self._layer, self._layers[index], work.backward_s[index])
            self._released(index)
        self._step()
        for index, layer in enumerate(self._layers):
            if work.bundle_of[index] >= 0 and not self._updated[work.bundle_of[index]]:
                yield partial(self._await, work.bundle_of[index])
            yield partial(self._layer, layer, work.forward_s[index])
        self.iteration_s = self._clock.now_s

    def _go_on(self) -> None:
        if (stretch := next(self._chain, None)) is not None:
            stretch()

    # -- the chain ---------------------------------------------------------------------

    def _await(self, bundle: int) -> None:
        self._waits_for = bundle

    def _layer(self, layer: LayerProfile, compute_s: float) -> None:
        if not layer.exchange_bytes:
            self._clock.call_at(self._clock.now_s + compute_s, self._go_on)
            return
        count = self._form.pieces
        _Pieces(self, layer.exchange_bytes / count, compute_s / count, count).begin()

    def exchange(self, nbytes: float, done: Callable[[], object]) -> None:
        """An all-to-all of so many bytes; ``done`` is called when it is over."""
        fabric, began_s = self._fabric, self._clock.now_s
        if self._form.is_urgent:
            self._core.hold()

        def over() -> None:
            self.exchanges_s.append(self._clock.now_s - began_s)
            # What follows at once holds before this one lets go.
            done()
            if self._form.is_urgent:
                self._start(self._core.release())

        alone_s = nbytes * (fabric.ranks - 1) / fabric.ranks / fabric.bytes_per_s
        self._send(alone_s, fabric.latency_s, over, is_queued=self._form.is_queued)

    def after(self, duration_s: float, then: Callable[[], object]) -> None:
        """Calls ``then`` when experts have computed for so long."""
        self._clock.call_at(self._clock.now_s + duration_s, then)

    def passed(self) -> None:
        """A layer of experts is over."""
        self._go_on()

    # -- gradients ---------------------------------------------------------------------

    def _released(self, layer: int) -> None:
        for index, job in enumerate(self._work.jobs):
            if job.layer == layer:
                self._tasks[index].notify_ready()
                self._start(self._core.ready(self._tasks[index]))

    def _start(self, tasks: Sequence[CommTask]) -> None:
        for task in tasks:
            job = self._work.jobs[task.index]
            work_s = self._fabric.occupied_s(job.nbytes, job.share)
            late_s = self._fabric.start_up_s(job.nbytes, job.share)
            arrived = partial(self._arrived, task)
            # Where nothing is planned, all is handed to one group at once.
            self._send(work_s, late_s, arrived, is_queued=not self._work.is_planned)

    def _arrived(self, task: CommTask) -> None:
        self._start(self._core.finish(task))
        for number, bundle in enumerate(self._work.bundles):
            if task.index in bundle.jobs:
                self._missing[number] -= 1
                if not self._missing[number] and self._stepped:
                    self._update(number)

    def _step(self) -> None:
        self._stepped = True
        for number, missing in enumerate(self._missing):
            if not missing and not self._updated[number]:
                self._update(number)

    def _update(self, number: int) -> None:
        self.after(self._work.bundles[number].update_s, partial(self._is_updated, number))

    def _is_updated(self, number: int) -> None:
        self._updated[number] = True
        if self._waits_for == number:
            self._waits_for = -1
            self._go_on()

    # -- the link ----------------------------------------------------------------------

    def _send(
        self, work_s: float, late_s: float, done: Callable[[], object], *, is_queued: bool
    ) -> None:
        """Puts a transfer on the link; ``late_s`` after it has left that, it is across."""
        if is_queued:
            self._queue.append((work_s, late_s, done))
            self._next_of_queue()
        else:
            self._link.start(work_s, partial(self.after, late_s, done))

    def _next_of_queue(self) -> None:
        while self._queue and self._under_way < _GROUP_SLOTS:
            self._under_way += 1
            work_s, late_s, done = self._queue.popleft()
            self._link.start(work_s, partial(self.after, late_s, partial(self._left, done)))

    def _left(self, done: Callable[[], object]) -> None:
        self._under_way -= 1
        self._next_of_queue()
        done()


class _Pieces:
    """A layer of experts whose all-to-alls are cut: one piece is sent at a time, in order."""

    def __init__(self, iteration: Exchanging, nbytes: float, compute_s: float, count: int) -> None:
        self._iteration, self._nbytes, self._compute_s = iteration, nbytes, compute_s
        self._to_send: deque[Callable[[], object]] = deque([self._dispatched] * count)
        self._is_sending = self._is_computing = False
        self._to_compute = 0
        self._missing = count

    def begin(self) -> None:
        """Dispatches the first piece."""
        self._next()

    def _next(self) -> None:
        if self._to_send and not self._is_sending:
            self._is_sending = True
            self._iteration.exchange(self._nbytes, partial(self._sent, self._to_send.popleft()))
        if self._to_compute and not self._is_computing:
            self._is_computing = True
            self._to_compute -= 1
            self._iteration.after(self._compute_s, self._computed)

    def _sent(self, then: Callable[[], object]) -> None:
        self._is_sending = False
        then()
        self._next()

    def _dispatched(self) -> None:
        self._to_compute += 1

    def _computed(self) -> None:
        self._is_computing = False
        self._to_send.append(self._combined)
        self._next()

    def _combined(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._iteration.passed()


def predict_exchanging(system: System, model: Model, fabric: Fabric) -> Prediction:
    """What ``system`` takes per iteration, on ranks that are alike, and its all-to-alls."""
    form, options = FORMS[system.kind], system.options
    cpu = model.costs.plain if system.kind.startswith("ddp") else model.costs.scheduled
    model = replace(model, costs=replace(model.costs, tensor_s=model.costs.tensor_s + cpu.tensor_s))
    work = _work(system, model, fabric)
    found = Exchanging(work, model.profile.layers, fabric, form).run()
    exchanges_s = found.exchanges_s
    return Prediction(
        system=system.label,
        ranks=fabric.ranks,
        iteration_s=found.iteration_s,
        optimum_s=exchanging_bound_s(model, fabric, in_pieces=form.pieces > 1),
        calibrated=system.kind != "idle",
        collectives=len(work.jobs) + len(exchanges_s),
        chosen=_chosen(work, options),
        exchange_p50_s=percentile(exchanges_s, 0.5),
        exchange_p95_s=percentile(exchanges_s, 0.95),
    )


def exchanging_bound_s(model: Model, fabric: Fabric, *, in_pieces: bool) -> float:
    """T* of the model (see link/bound.py)."""
    exchanged_per_s = fabric.bytes_per_s * fabric.ranks / (fabric.ranks - 1)
    return exchanging_optimum_s(
        model.profile.chain(), fabric.gradient_bytes_per_s, exchanged_per_s, in_pieces=in_pieces
    )


def _task(index: int, job: Job) -> CommTask:
    task = CommTask(f"job{index}", start_at=0, stop_at=job.nbytes, itemsize=1, priority=job.gate)
    task.index = index
    return task


def _work(system: System, model: Model, fabric: Fabric) -> Work:
    options = system.options
    if system.kind.startswith("ddp"):
        size = float(options["bucket_mb"]) if "bucket_mb" in options else None
        return buckets(model, size, are_views=options.get("bucket_view") == "1")
    work = scheduled(model, fabric, options)
    if system.kind == "idle":
        # Gradients that take no time: the whole step is an update.
        bundles, gates = model.whole(0)
        return replace(work, jobs=(), bundles=bundles, bundle_of=gates)
    return work


def _chosen(work: Work, options: dict[str, str]) -> str:
    largest = max((job.nbytes for job in work.jobs), default=0)
    return f"{largest / 1e6:.2f} MB" if largest else ""
