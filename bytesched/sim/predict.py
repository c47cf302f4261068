"""What each system takes on a fabric, and the least that any could take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from bytesched.bench.systems import System, ddp_arguments
from bytesched.link.bound import gradients, optimum_s, split_optimum_s
from bytesched.link.cluster import ITERATIONS, Cluster, Work
from bytesched.link.fabric import Fabric
from bytesched.sim.systems import (
    BUCKETS_MB,
    DEFAULT_BUCKET_MB,
    Model,
    buckets,
    scheduled,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One system on one fabric.

    Times are means over the second half of the iterations, as an order is planned in the first one.
    """

    system: str
    ranks: int
    iteration_s: float
    optimum_s: float
    collectives: int
    #: settings that were chosen for it
    chosen: str

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


def predict(system: System, model: Model, fabric: Fabric) -> Prediction:
    """What ``system`` takes per iteration."""
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
    for build, chosen in candidates(system, fabric):
        work = build(on_cores(model, build(model), fabric))
        cluster = Cluster(work, fabric)
        ended_s = [cluster.iterate() for _ in range(ITERATIONS)]
        tried.append((_mean_s(ended_s), work, largest_mb(work) if work.is_planned else chosen))
    iteration_s, work, chosen = min(tried, key=lambda one: one[0])
    return Prediction(
        system=system.label,
        ranks=fabric.ranks,
        iteration_s=iteration_s,
        optimum_s=bound_s(model, fabric),
        collectives=len(work.jobs),
        chosen=chosen,
    )


def _mean_s(ended_s: Sequence[float]) -> float:
    """Of the second half."""
    half = len(ended_s) // 2
    return (ended_s[-1] - ended_s[half - 1]) / (len(ended_s) - half)


def on_cores(model: Model, work: Work, fabric: Fabric) -> Model:
    """The model on cores that it shares with this communication, which is taken at full speed."""
    alone = replace(fabric, cores=math.inf)
    cpu_s = sum(alone.cpu_s(job.nbytes) for job in work.jobs)
    busiest = cpu_s / sum(alone.occupied_s(job.nbytes) for job in work.jobs)
    # What waits for all of backward takes no core from it.
    early_s = sum(alone.cpu_s(job.nbytes) for job in work.jobs if job.layer)
    backward_s = sum(work.backward_s)
    crosses = len(work.bundles) > 1
    return model.beside(
        backward=min(busiest, early_s / backward_s) if backward_s else 0.0,
        afterwards=busiest if crosses else 0.0,
    )


def candidates(system: System, fabric: Fabric) -> list[tuple[Callable[[Model], Work], str]]:
    """What the system may be, of a model, and what was chosen for it; the fastest counts."""
    options = system.options
    if system.kind == "ddp-best":
        return [
            (partial(buckets, bucket_mb=size, are_views=True), f"{size} MB") for size in BUCKETS_MB
        ]
    if system.kind == "ddp":
        given = ddp_arguments(options)
        size, are_views = given.get("bucket_cap_mb"), given.get("gradient_as_bucket_view", False)
        chosen = f"{size or DEFAULT_BUCKET_MB:g} MB"
        return [(partial(buckets, bucket_mb=size, are_views=are_views), chosen)]
    return [(partial(scheduled, fabric=fabric, options=options), "")]


def largest_mb(work: Work) -> str:
    """Of what is sent at once; nothing where nothing is sent."""
    largest = max((job.nbytes for job in work.jobs), default=0)
    return f"{largest / 1e6:.2f} MB" if largest else ""
