"""What each system takes on a fabric, and the least that any could take."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from bytesched.bench.systems import System
from bytesched.course import is_repeated, is_replayed
from bytesched.errors import PluginError
from bytesched.link.bound import gradients, optimum_s, split_optimum_s
from bytesched.link.cluster import Cluster, Iteration
from bytesched.link.control import WORD_BYTES, Control, Weather
from bytesched.link.fabric import Fabric
from bytesched.link.vectors import VectorCluster
from bytesched.link.work import Gather, Job, Work
from bytesched.sim.systems import (
    BUCKETS_MB,
    CALIBRATED,
    DEFAULT_BUCKET_MB,
    Model,
    buckets,
    scheduled,
    sharded,
)
from bytesched.tree import FAN_OUT
from bytesched.tunable import ORDERS

__all__ = ["Prediction", "bound_s", "check_ranks", "control_of", "iterate", "on_cores", "predict"]

#: up to so many ranks, each has a scheduler core of its own
_EVENT_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One system on one fabric.

    Times and messages are means over the second half of the iterations, as an order that is to be
    replayed is planned in the first one.
    """

    system: str
    ranks: int
    iteration_s: float
    optimum_s: float
    #: whether its predictions were held against measurements
    calibrated: bool
    collectives: int
    #: settings that were chosen for it
    chosen: str
    #: of the leader's order: sent by all ranks, and by the busiest one
    messages: float
    busiest_messages: float
    message_bytes: float
    #: share of these iterations that replayed an order
    replayed: float
    #: of all-to-alls, from call to end: the median, and what 95 % of them do not exceed
    exchange_p50_s: float = 0.0
    exchange_p95_s: float = 0.0

    @property
    def to_optimum(self) -> float:
        """Multiple of T*."""
        return self.iteration_s / self.optimum_s

    def to_json(self) -> dict[str, Any]:
        """As the command writes it."""
        return asdict(self) | {"to_optimum": self.to_optimum}


def bound_s(model: Model, fabric: Fabric) -> float:
    """T* of the model, or of what clips (see link/bound.py)."""
    chain = model.profile.chain()
    bound = split_optimum_s if model.clip else optimum_s
    return bound(gradients(chain), model.profile.compute_s, fabric.gradient_bytes_per_s)


def control_of(fabric: Fabric, order: str, *, send_s: float) -> Control:
    """How the ranks of a fabric learn rank 0's order, or repeat one that they know."""
    return Control(
        fanout=FAN_OUT,
        send_s=send_s,
        latency_s=fabric.latency_s,
        replay=is_replayed(order, fabric.ranks),
        repeat=is_repeated(order, fabric.ranks),
    )


def iterate(
    work: Work, fabric: Fabric, control: Control, weather: Sequence[Weather]
) -> list[Iteration]:
    """Iterations of all ranks, one for each entry of ``weather``."""
    check_ranks(fabric.ranks)
    kind = Cluster if fabric.ranks <= _EVENT_RANKS else VectorCluster
    cluster: Cluster | VectorCluster = kind(work, fabric, control)
    return [cluster.iterate(one) for one in weather]


def check_ranks(ranks: int) -> None:
    """Raises `PluginError` for more ranks than can be predicted with what is installed."""
    if ranks > _EVENT_RANKS and importlib.util.find_spec("numpy") is None:
        raise PluginError(
            f"more than {_EVENT_RANKS} ranks need numpy: pip install 'bytesched[report]', or "
            f"--ranks {_EVENT_RANKS}"
        )


def predict(
    system: System, model: Model, fabric: Fabric, weather: Sequence[Weather], *, send_s: float
) -> Prediction:
    """What ``system`` takes per iteration. Raises `ConfigError` for options it does not know."""
    order = system.options.get("order", ORDERS[0])
    control = control_of(fabric, order, send_s=send_s)
    costs = model.costs
    cpu = costs.scheduled if system.kind == "bytesched" else costs.plain
    model = replace(model, costs=replace(costs, tensor_s=costs.tensor_s + cpu.tensor_s))
    fabric = replace(
        fabric,
        message_cpu_s=cpu.message_s,
        byte_cpu_s=cpu.byte_s,
        cores=costs.cores.left(costs.cpu_load),
    )
    tried = []
    for build, chosen in _candidates(system, fabric):
        work = build(on_cores(model, build(model), fabric))
        found = iterate(work, fabric, control, weather)
        tried.append((_mean_s(found), work, _size(system, work, chosen), found[len(found) // 2 :]))
    iteration_s, work, chosen, found = min(tried, key=lambda one: one[0])
    words = sum(one.words for one in found) / len(found) if control.fanout else 0.0
    others = fabric.ranks - 1
    return Prediction(
        system=system.label,
        ranks=fabric.ranks,
        iteration_s=iteration_s,
        optimum_s=bound_s(model, fabric),
        calibrated=system.kind in CALIBRATED,
        collectives=len(work.jobs) + len(work.gathers),
        chosen=chosen,
        messages=words * others,
        busiest_messages=words * len(control.children(0, fabric.ranks)),
        message_bytes=words * others * WORD_BYTES,
        replayed=sum(one.replayed for one in found) / len(found),
    )


def _mean_s(found: Sequence[Iteration]) -> float:
    """Of the second half."""
    half = len(found) // 2
    began_s = found[half - 1].ended_s if half else 0.0
    return (found[-1].ended_s - began_s) / (len(found) - half)


def on_cores(model: Model, work: Work, fabric: Fabric) -> Model:
    """The model on cores that it shares with this communication, which is taken at full speed."""
    alone = replace(fabric, cores=math.inf)
    sent: list[Job | Gather] = [*work.jobs, *work.gathers]
    cpu_s = sum(alone.cpu_s(one.nbytes, one.share) for one in sent)
    busiest = cpu_s / sum(alone.occupied_s(one.nbytes, one.share) for one in sent)
    # What waits for all of backward takes no core from it.
    early = [job for job in work.jobs if job.layer]
    early_s = sum(alone.cpu_s(job.nbytes, job.share) for job in early)
    backward_s = sum(work.backward_s)
    crosses = len(work.bundles) > 1 or bool(work.gathers)
    return model.beside(
        backward=min(busiest, early_s / backward_s) if backward_s else 0.0,
        afterwards=busiest if crosses else 0.0,
    )


def _candidates(system: System, fabric: Fabric) -> list[tuple[Callable[[Model], Work], str]]:
    """What the system may be, of a model, and what was chosen for it; the fastest counts."""
    options = system.options
    if system.kind == "ddp-best":
        return [
            (partial(buckets, bucket_mb=size, are_views=True), f"{size} MB") for size in BUCKETS_MB
        ]
    if system.kind == "ddp":
        size = float(options["bucket_mb"]) if "bucket_mb" in options else None
        are_views = options.get("bucket_view") == "1"
        chosen = f"{size or DEFAULT_BUCKET_MB:g} MB"
        return [(partial(buckets, bucket_mb=size, are_views=are_views), chosen)]
    if system.kind == "fsdp2":
        return [(partial(sharded, ranks=fabric.ranks, by_gloo=fabric.overlaps), "")]
    return [(partial(scheduled, fabric=fabric, options=options), "")]


def _size(system: System, work: Work, chosen: str) -> str:
    if system.kind != "bytesched":
        return chosen
    return f"{max(job.nbytes for job in work.jobs) / 1e6:.2f} MB"
