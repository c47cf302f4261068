"""An iteration with layers of experts: a chain that waits for all-to-alls beside gradients.

One rank stands for all of them: they are alike, and none waits for another's word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush

from bytesched.bench.profile import LayerProfile
from bytesched.bench.systems import EXCHANGE_PIECES, System
from bytesched.bench.table import percentile
from bytesched.link.bound import exchanging_optimum_s
from bytesched.link.cluster import Work
from bytesched.link.fabric import Fabric
from bytesched.link.shared import SharedLink
from bytesched.sim.predict import Prediction
from bytesched.sim.systems import Model, buckets, scheduled

__all__ = ["FORMS", "Exchanging", "predict_exchanging"]

#: collectives of one group that Gloo has under way at a time: its threads
_GROUP_SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a system carries all-to-alls."""

    #: behind the gradients that were handed to the same group before, else beside them
    is_queued: bool = False
    pieces: int = 1


FORMS = {
    "ddp": Form(is_queued=True),
    "ddp-own-group": Form(),
    "bytesched-no-lane": Form(),
    # Urgent sections hold what goes to stores alone.
    "bytesched": Form(),
    "bytesched-pieces": Form(pieces=EXCHANGE_PIECES),
    "idle": Form(),
}


class Exchanging:
    """One iteration of ``work`` with the all-to-alls of ``layers``, from backward to backward."""

    def __init__(
        self, work: Work, layers: Sequence[LayerProfile], fabric: Fabric, form: Form
    ) -> None:
        self._work, self._layers, self._fabric, self._form = work, layers, fabric, form
        self._link = SharedLink()
        #: calls back when experts have computed for so long
        self.after = self._link.after
        #: of the group of gradients: the key of what goes first, a number, seconds, what follows
        self._queue: list[tuple[int, int, float, float, Callable[[], object]]] = []
        self._handed_over = 0
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
        self._link.run()
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
        self.iteration_s = self._link.now_s

    def _go_on(self) -> None:
        if (stretch := next(self._chain, None)) is not None:
            stretch()

    # -- the chain ---------------------------------------------------------------------

    def _await(self, bundle: int) -> None:
        self._waits_for = bundle

    def _layer(self, layer: LayerProfile, compute_s: float) -> None:
        if not layer.exchange_bytes:
            self.after(compute_s, self._go_on)
            return
        count = self._form.pieces
        _Pieces(self, layer.exchange_bytes / count, compute_s / count, count).begin()

    def exchange(self, nbytes: float, done: Callable[[], object]) -> None:
        """An all-to-all of so many bytes; ``done`` is called when it is over."""
        fabric, began_s = self._fabric, self._link.now_s

        def over() -> None:
            self.exchanges_s.append(self._link.now_s - began_s)
            done()

        alone_s = nbytes * (fabric.ranks - 1) / fabric.ranks / fabric.bytes_per_s
        if self._form.is_queued:
            self._hand_over(0, alone_s, fabric.latency_s, over)
        else:
            self._link.start(alone_s, partial(self.after, fabric.latency_s, over))

    def passed(self) -> None:
        """A layer of experts is over."""
        self._go_on()

    # -- gradients ---------------------------------------------------------------------

    def _released(self, layer: int) -> None:
        is_planned = self._work.is_planned and self._work.policy != "fifo"
        for index, job in enumerate(self._work.jobs):
            if job.layer == layer:
                self._hand_over(
                    # What a plan comes to whose times are those of this iteration.
                    job.gate if is_planned else 0,
                    self._fabric.occupied_s(job.nbytes, job.share),
                    self._fabric.start_up_s(job.nbytes, job.share),
                    partial(self._arrived, index),
                )

    def _arrived(self, index: int) -> None:
        for number, bundle in enumerate(self._work.bundles):
            if index in bundle.jobs:
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

    def _hand_over(
        self, key: int, work_s: float, late_s: float, done: Callable[[], object]
    ) -> None:
        """Queues a collective; ``late_s`` after it has left the link, it is across."""
        heappush(self._queue, (key, self._handed_over, work_s, late_s, done))
        self._handed_over += 1
        self._next_of_queue()

    def _next_of_queue(self) -> None:
        while self._queue and self._under_way < _GROUP_SLOTS:
            self._under_way += 1
            _, _, work_s, late_s, done = heappop(self._queue)
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
