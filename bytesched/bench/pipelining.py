"""Replicated pipelines, measured: schedules, and three ways to reduce their stages' gradients."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bytesched.bench.own_ranks import OwnRanks, common, emulated, measure
from bytesched.bench.profile import ELEMENT_BYTES, Profile
from bytesched.bench.specification import Specification
from bytesched.bench.steady import bound_s, reduced_at_end_s
from bytesched.errors import ConfigError
from bytesched.pipeline.order import Order
from bytesched.pipeline.placement import placed
from bytesched.pipeline.replay import replay
from bytesched.pipeline.stages import Link, Pipeline, Stage
from bytesched.table import aligned

__all__ = [
    "AT_THE_END",
    "BYTESCHED",
    "DDP",
    "SEARCHED",
    "PipelineSpecification",
    "facts",
    "measure_pipelines",
    "pipeline_of",
    "placements",
    "predict",
    "stage_shapes",
    "table",
]

WORKER: Final = "bytesched.plugins.bench.pipeline_worker"
AT_THE_END: Final = "at the end"
DDP: Final = "ddp"
BYTESCHED: Final = "bytesched"
SEARCHED: Final = "searched"
#: stages of each rank, in schedules that have more than one; 1F1B has their sum in one
_PARTS: Final = 2
_DEFAULT_HOSTS: Final = 4
#: the part of an iteration below which what can be hidden drowns in how runs differ
_WORTH_HIDING: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class PipelineSpecification(OwnRanks):
    """What `bytesched bench --pipeline` measures."""

    #: the profile that is cut into stages and emulated
    profile: object
    #: of one pipeline
    ranks: int
    micro_batches: int
    #: of a micro-batch between stages
    boundary_bytes: int


def _specification(spec: Specification, options: Namespace, hosts: int) -> PipelineSpecification:
    """What is asked for. Raises `ConfigError` for what cannot be measured with pipelines."""
    ranks = options.pipeline
    profile = emulated(spec, options, "cuts an emulated model into stages", others=["clip"])
    if ranks < 2 or hosts % ranks or hosts // ranks < 2:
        raise ConfigError(
            f"--pipeline {ranks} on {hosts} hosts: pipelines have 2 ranks or more, and there are 2 "
            "or more of them: give --lab a multiple"
        )
    micro_batches = 4 * ranks if options.micro_batches is None else options.micro_batches
    if not 2 * ranks <= micro_batches <= 1024:
        # torch's zero-bubble schedule for two stages on a rank makes no order of fewer.
        raise ConfigError(f"--micro-batches {micro_batches}: from {2 * ranks} to 1024")
    if options.boundary_bytes < ELEMENT_BYTES:
        raise ConfigError(f"--boundary-bytes {options.boundary_bytes}: at least {ELEMENT_BYTES}")
    if not all(stage_shapes(profile, _PARTS * ranks)):
        raise ConfigError(
            f"--pipeline {ranks}: some of {_PARTS * ranks} stages of {profile.name} have no "
            "parameters; give a profile of more layers, or fewer ranks"
        )
    return PipelineSpecification(
        profile=spec.content,
        ranks=ranks,
        micro_batches=micro_batches,
        boundary_bytes=options.boundary_bytes,
        **common(spec, options),
    )


def measure_pipelines(
    bench: Specification, options: Namespace, arguments: Sequence[str]
) -> list[str]:
    """Measure, and write what was found; the lines of a report. Raises `ConfigError`."""
    hosts = options.lab or options.workers or _DEFAULT_HOSTS
    spec = _specification(bench, options, hosts)
    found, network = measure(WORKER, spec, hosts, options, arguments)
    pipelines = f"{hosts // spec.ranks} pipelines of {spec.ranks} ranks"
    heading = (
        f"{pipelines}, {spec.micro_batches} micro-batches (emulated compute), {network}\n"
        f"of a rank: compute {found['compute_ms']:.1f} ms, "
        f"reduction {found['reduction_ms']:.1f} ms; "
        f"a boundary of {spec.boundary_bytes} bytes takes {found['crossing_ms']:.2f} ms"
    )
    return [heading, "", *table(found)]


def stage_shapes(profile: Profile, stages: int) -> list[list[tuple[int, ...]]]:
    """The shapes of the parameters of each of ``stages`` that take equally long.

    A layer's parameters are in the stage that has the middle of its time.
    """
    found: list[list[tuple[int, ...]]] = [[] for _ in range(stages)]
    whole_ms = 1e3 * profile.compute_s
    before_ms = 0.0
    for layer in profile.layers:
        its_ms = layer.forward_ms + layer.backward_ms
        stage = min(stages - 1, int(stages * (before_ms + its_ms / 2) / whole_ms))
        found[stage] += layer.shapes
        before_ms += its_ms
    return found


def pipeline_of(
    profile: Profile,
    stage_ranks: tuple[int, ...],
    spec: PipelineSpecification,
    link: Link,
    replicas: int,
) -> Pipeline:
    """The pipeline that such a cut is. A backward is half of it for inputs, half for weights.

    Activations are counted: those of one of two stages on every rank are 1.
    """
    stages = len(stage_ranks)
    parts = _PARTS * spec.ranks // stages
    share = 1e-3 / (stages * spec.micro_batches)
    forward_s = share * sum(layer.forward_ms for layer in profile.layers)
    half_s = share * sum(layer.backward_ms for layer in profile.layers) / 2
    sizes = [
        ELEMENT_BYTES * sum(_elements(shape) for shape in shapes)
        for shapes in stage_shapes(profile, stages)
    ]
    return Pipeline(
        tuple(
            Stage(forward_s, half_s, half_s, parts, spec.boundary_bytes, nbytes) for nbytes in sizes
        ),
        stage_ranks,
        link,
        replicas,
    )


def _elements(shape: Sequence[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def placements(ranks: int) -> dict[str, tuple[int, ...]]:
    """The ranks of the stages of each schedule, in the order of the table."""
    there_and_back = placed("v", ranks, _PARTS)
    return {
        "1f1b": placed("v", ranks, 1),
        "interleaved": placed("interleaved", ranks, _PARTS),
        "zbv": there_and_back,
        SEARCHED: there_and_back,
    }


def facts(order: Order, pipeline: Pipeline) -> dict[str, Any]:
    """What an order is, and what it holds."""
    return {
        "order": order.to_csv(),
        "activations": max(replay(order, pipeline).peak_bytes),
        "splits_backward": order.splits_backward,
        "end_ms": [],
        "bound_ms": [],
    }


def predict(its: dict[str, Any], order: Order, pipeline: Pipeline) -> None:
    """Adds what the order takes with its reductions in this round, whose link is the pipeline's."""
    its["end_ms"].append(1e3 * reduced_at_end_s(order, pipeline))
    its["bound_ms"].append(1e3 * bound_s(order, pipeline))


def table(found: dict[str, Any]) -> list[str]:
    """The lines of a table: how long iterations take, how long they should, what is hidden."""
    lines: list[tuple[str, ...]] = [
        ("schedule", "reduced", "iteration ms", "predicted ms", "of it", "held", "hidden", "bits")
    ]
    times: dict[tuple[str, str], float] = {}
    for name, its in found["schedules"].items():
        took = {arm: statistics.median(turns) for arm, turns in its["iteration_ms"].items()}
        times |= {(name, arm): took_ms for arm, took_ms in took.items()}
        for arm, took_ms in took.items():
            goals_ms = {AT_THE_END: its["end_ms"], BYTESCHED: its["bound_ms"]}.get(arm, [])
            ratios = [t / goal for t, goal in zip(its["iteration_ms"][arm], goals_ms, strict=False)]
            hidden = _hidden(its, arm)
            lines.append(
                (
                    name,
                    arm,
                    f"{took_ms:.1f}",
                    f"{statistics.median(goals_ms):.1f}" if ratios else "-",
                    f"{statistics.median(ratios):.3f}x" if ratios else "-",
                    str(its["activations"]),
                    "-" if hidden is None else f"{100 * hidden:.0f} %",
                    "same" if its["same_bits"][arm] else "DIFFER",
                )
            )
    return [
        *aligned(lines, "<<>>>>><"),
        "",
        "iteration, of it, hidden: medians of the rounds. predicted: of the order by replay over",
        "the link that was measured before each round, with reductions after it (at the end), or",
        "beside it and the next iteration's forwards (bytesched: the bound).",
        "held: the most stage-activations on a rank, where each rank has two stages.",
        "hidden: (at the end - this) / (at the end - bound). bits: weights and losses, against at "
        "the end.",
        *_verdict(found["schedules"], times),
    ]


def _hidden(its: dict[str, Any], arm: str) -> float | None:
    """The share of a reduction that is hidden; None where next to nothing can be."""
    taken_ms = its["iteration_ms"]
    rounds = zip(taken_ms[AT_THE_END], taken_ms[arm], its["end_ms"], its["bound_ms"], strict=False)
    found: list[float] = []
    for at_end_ms, took_ms, end_ms, bound_ms in rounds:
        if at_end_ms <= bound_ms or end_ms - bound_ms < _WORTH_HIDING * end_ms:
            return None
        found.append((at_end_ms - took_ms) / (at_end_ms - bound_ms))
    return None if arm == AT_THE_END else statistics.median(found)


def _verdict(schedules: dict[str, Any], times: dict[tuple[str, str], float]) -> list[str]:
    """The searched order against the best that torch has alone, with as much memory."""
    if SEARCHED not in schedules:
        return []
    most = schedules[SEARCHED]["activations"]
    others = {
        place: took_ms
        for place, took_ms in times.items()
        if place[0] != SEARCHED
        and place[1] != BYTESCHED
        and schedules[place[0]]["activations"] <= most
    }
    if not others:
        return []
    best = min(others, key=others.__getitem__)
    ratio = times[SEARCHED, BYTESCHED] / others[best]
    return [
        f"searched, bytesched: {ratio:.3f}x torch's best that holds no more ({', '.join(best)})"
    ]
