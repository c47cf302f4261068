"""An iteration with layers of experts: a chain that waits for all-to-alls beside gradients.

One rank stands for all of them: they are alike, and none waits for another's word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

from bytesched.bench.profile import LayerProfile
from bytesched.bench.systems import EXCHANGE_PIECES, System
from bytesched.bench.table import percentile
from bytesched.link.bound import exchanging_optimum_s
from bytesched.link.cluster import Work
from bytesched.link.fabric import Fabric
from bytesched.link.shared import Event, Process, SharedLink
from bytesched.sim.predict import Prediction, candidates, largest_mb
from bytesched.sim.systems import Model

__all__ = ["Exchanging", "predict_exchanging"]

#: collectives of one group that Gloo has under way at a time: its threads
_GROUP_SLOTS = 2


class Exchanging:
    """One iteration of ``work`` with the all-to-alls of ``layers``, from backward to backward.

    Args:
        is_queued: whether an all-to-all goes behind the gradients that were handed to the same
            group before, else beside them.
        pieces: into which it is cut.
    """

    def __init__(
        self,
        work: Work,
        layers: Sequence[LayerProfile],
        fabric: Fabric,
        *,
        is_queued: bool,
        pieces: int,
    ) -> None:
        self._work, self._layers, self._fabric = work, layers, fabric
        self._is_queued, self._pieces = is_queued, pieces
        self._link = SharedLink()
        #: of the group of gradients: the key of what goes first, a number, seconds, the end
        self._queue: list[tuple[int, int, float, float, Event]] = []
        self._handed_over = self._under_way = 0
        self._arrived: dict[int, Event] = {}
        self._updated = [Event() for _ in work.bundles]
        #: seconds of each all-to-all, or piece of one
        self.exchanges_s: list[float] = []
        self.iteration_s = 0.0

    def run(self) -> Exchanging:
        """Itself, with its times."""
        self._link.go_on(self._chain())
        self._link.run()
        return self

    # -- what goes on ------------------------------------------------------------------

    def _chain(self) -> Process:
        work = self._work
        for index in reversed(range(len(self._layers))):
            yield from self._layer(self._layers[index], work.backward_s[index])
            self._released(index)
        for number in range(len(work.bundles)):
            self._link.go_on(self._update(number))
        for index, layer in enumerate(self._layers):
            if work.bundle_of[index] >= 0:
                yield self._updated[work.bundle_of[index]]
            yield from self._layer(layer, work.forward_s[index])
        self.iteration_s = self._link.now_s

    def _update(self, number: int) -> Process:
        bundle = self._work.bundles[number]
        for job in bundle.jobs:
            yield self._arrived[job]
        yield bundle.update_s
        self._updated[number].happen()

    def _layer(self, layer: LayerProfile, compute_s: float) -> Process:
        """Of experts: pieces are dispatched, computed and sent back, each in their order."""
        if not layer.exchange_bytes:
            yield compute_s
            return
        count = self._pieces
        nbytes = layer.exchange_bytes / count
        dispatched, computed = ([Event() for _ in range(count)] for _ in range(2))

        def compute() -> Process:
            for there, done in zip(dispatched, computed, strict=True):
                yield there
                yield compute_s / count
                done.happen()

        self._link.go_on(compute())
        for piece in dispatched:
            yield from self._exchange(nbytes)
            piece.happen()
        for piece in computed:
            yield piece
            yield from self._exchange(nbytes)

    def _exchange(self, nbytes: float) -> Process:
        """An all-to-all of so many bytes."""
        fabric, began_s = self._fabric, self._link.now_s
        alone_s = nbytes * (fabric.ranks - 1) / fabric.ranks / fabric.bytes_per_s
        if self._is_queued:
            yield self._hand_over(0, alone_s, fabric.latency_s)
        else:
            yield self._link.carry(alone_s)
            yield fabric.latency_s
        self.exchanges_s.append(self._link.now_s - began_s)

    # -- the group of gradients ----------------------------------------------------------

    def _released(self, layer: int) -> None:
        is_planned = self._work.is_planned and self._work.policy != "fifo"
        for index, job in enumerate(self._work.jobs):
            if job.layer == layer:
                # A plan comes to this, where its times are those of this iteration.
                key = job.gate if is_planned else 0
                work_s = self._fabric.occupied_s(job.nbytes, job.share)
                late_s = self._fabric.start_up_s(job.nbytes, job.share)
                self._arrived[index] = self._hand_over(key, work_s, late_s)

    def _hand_over(self, key: int, work_s: float, late_s: float) -> Event:
        """The end of a collective, ``late_s`` after it has left the link."""
        end = Event()
        heappush(self._queue, (key, self._handed_over, work_s, late_s, end))
        self._handed_over += 1
        self._start_next()
        return end

    def _start_next(self) -> None:
        while self._queue and self._under_way < _GROUP_SLOTS:
            self._under_way += 1
            self._link.go_on(self._carried(*heappop(self._queue)[2:]))

    def _carried(self, work_s: float, late_s: float, end: Event) -> Process:
        yield self._link.carry(work_s)
        yield late_s
        self._under_way -= 1
        self._start_next()
        end.happen()


def predict_exchanging(system: System, model: Model, fabric: Fabric) -> Prediction:
    """What ``system`` takes per iteration, on ranks that are alike, and its all-to-alls."""
    in_pieces = system.kind == "bytesched-pieces"
    cpu = model.costs.plain if system.kind.startswith("ddp") else model.costs.scheduled
    model = replace(model, costs=replace(model.costs, tensor_s=model.costs.tensor_s + cpu.tensor_s))
    work = _work(system, model, fabric)
    found = Exchanging(
        work,
        model.profile.layers,
        fabric,
        # Those of bytesched do not wait either: urgent sections hold what goes to stores alone.
        is_queued=system.kind == "ddp",
        pieces=EXCHANGE_PIECES if in_pieces else 1,
    ).run()
    exchanges_s = found.exchanges_s
    return Prediction(
        system=system.label,
        ranks=fabric.ranks,
        iteration_s=found.iteration_s,
        optimum_s=exchanging_bound_s(model, fabric, in_pieces=in_pieces),
        calibrated=system.kind != "idle",
        collectives=len(work.jobs) + len(exchanges_s),
        chosen=largest_mb(work),
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
    [(build, _)] = candidates(system, fabric)
    work = build(model)
    if system.kind == "idle":
        # Gradients that take no time: the whole step is an update.
        bundles, gates = model.whole(0)
        return replace(work, jobs=(), bundles=bundles, bundle_of=gates)
    return work
