"""`bytesched burst`: how many devices each layer gets, and what is left for another job."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bytesched.burst.compare import Point, burst_point, data_parallel, static_partitions
from bytesched.burst.cost import Cluster, Place, Plan, Task
from bytesched.burst.graph import Chain, Layer, layers_of, load_graph, shipped_graphs
from bytesched.burst.planfile import plan_to_json
from bytesched.burst.search import Found, fastest_plan
from bytesched.files import write_text
from bytesched.lab.hosts import parse_rate
from bytesched.parser import CommandParser, Option, read_by, within, writable_file
from bytesched.table import aligned

#: of one background step: only whole ones count
STEP_NS = 250_000
EPILOG = """\
  bytesched burst plan --profile vgg16 --gpus 8 --amplification 2.0 --rate 100gbit
  bytesched bench --model vgg --batch 4,8,16,32 --record vgg.json --systems ddp --rounds 1
  bytesched burst plan --profile vgg.json --gpus 8 --json plan.json
"""
_OTHERS = "plan again with another --amplification"
REPLACED = {
    "--background-us": "a background step takes 250 us",
    "--bandwidth": "it is --rate",
    "--curve": _OTHERS,
    "--fixed-share": "it is a fifth; measure several batch sizes: bench --batch 4,8,16 --record",
    "--png": f"--json has the plan, and a run has a timeline; {_OTHERS}",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when that went well."""
    options = _parser().parse_args(argv)
    graph = load_graph(options.profile, batch=options.batch)
    cluster = Cluster(options.gpus, options.rate / 8, options.latency_us / 1e6)
    task = Task(graph, cluster, options.amplification)
    found = fastest_plan(task)
    points = [
        data_parallel(task, task.graph.widths(task.cluster.devices)[-1], "data parallel"),
        *static_partitions(task),
        burst_point(task, f"burst {options.amplification:g}", found.schedule, STEP_NS),
    ]
    print("\n".join(_table(task, found)))
    print("\n".join(_comparison(task, points)))
    if options.json:
        content = _result(task, found, points)
        write_text(Path(options.json), json.dumps(content, indent=1) + "\n")
        print(f"json: {options.json}")
    return 0


def _rows(chain: Chain, plan: Plan, depth: int = 0) -> Iterator[tuple[str, str, int]]:
    """Name, devices and indentation of every item."""
    for item, placed in zip(chain, plan, strict=True):
        if isinstance(item, Layer):
            assert isinstance(placed, Place)
            yield item.name, _devices(placed), depth
            continue
        assert not isinstance(placed, Place)
        for number, (branch, places) in enumerate(
            zip(item.branches, placed.branches, strict=True), 1
        ):
            rows = list(_rows(branch, places, depth + 1))
            yield f"{item.name}, branch {number}", "" if rows else "shortcut", depth
            yield from rows
        yield f"{item.name}, join", _devices(placed.join), depth


def _devices(place: Place) -> str:
    if place.width == 1:
        return f"device {place.first}"
    return f"devices {place.first} to {place.first + place.width - 1}"


def _table(task: Task, found: Found) -> Iterator[str]:
    graph, timeline = task.graph, found.schedule
    rows = list(_rows(graph.chain, found.plan))
    yield from aligned([("  " * depth + name, devices) for name, devices, depth in rows], "<<")
    yield ""
    one_ms = graph.single_device_ns / 1e6
    yield f"{graph.name}, batch {graph.batch}: {one_ms:.2f} ms on one device"
    yield (
        f"planned: {timeline.time_ns / 1e6:.2f} ms, of which "
        f"{(timeline.time_ns - timeline.computed_ns) / 1e6:.2f} ms wait for gradients; "
        f"amplification {timeline.device_ns / graph.single_device_ns:.2f}"
    )
    if graph.assumed:
        yield graph.assumed
    least = max(layer.forward.points[0][0] for layer in layers_of(graph.chain))
    if graph.batch // graph.widths(task.cluster.devices)[-1] < least:
        yield (
            f"with fewer than {least} samples, the fewest that were measured, layers are taken to "
            "be no faster"
        )
    yield ""


def _comparison(task: Task, points: Sequence[Point]) -> Iterator[str]:
    """Throughput of both jobs; the last point is the plan."""
    plain = points[0]
    rows: list[tuple[str, ...]] = [("", "ms", "foreground", "background", "total", "vs plain")]
    for point in points:
        devices = (point.foreground, point.background, point.total)
        ratio = f"{point.total / plain.total:.2f}x"
        figures = (f"{value:.2f}" for value in (point.time_ns / 1e6, *devices))
        rows.append((point.label, *figures, ratio))
    yield from aligned(rows, "<>>>>>")
    yield (
        f"In devices, of {task.cluster.devices}. The background is what fits into the gaps of the "
        "plan, before what sharing a device costs."
    )


def _result(task: Task, found: Found, points: Sequence[Point]) -> dict[str, Any]:
    return {
        "model": task.graph.name,
        "batch": task.graph.batch,
        "devices": task.cluster.devices,
        "bytes_per_s": task.cluster.bytes_per_s,
        "latency_us": task.cluster.latency_s * 1e6,
        "assumed": task.graph.assumed,
        "amplification_limit": task.amplification,
        "amplification": found.schedule.device_ns / task.graph.single_device_ns,
        "single_device_ms": task.graph.single_device_ns / 1e6,
        "iteration_ms": found.schedule.time_ns / 1e6,
        "compared": [point.to_json() for point in points],
        "plan": plan_to_json(task.graph.chain, found.plan),
    }


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="bytesched burst",
        description="Give every layer as many devices as it scales to, and find what is left.",
        epilog=EPILOG,
        replaced=REPLACED,
    )
    parser.add_argument("verb", choices=("plan",), help="the number of devices for every layer")
    parser.add_argument(
        "--profile",
        nargs="+",
        required=True,
        metavar="PROFILE",
        help=f"{', '.join(shipped_graphs())}, a file with several batch sizes, or files of "
        "`bench --record`",
    )
    parser.add_options(
        (
            Option("--gpus", "N", within(1, 64), 8, "devices (8)"),
            Option(
                *("--amplification", "X", within(1.0, 1e3), 2.0),
                "device-seconds over those of one device, at most (2)",
            ),
            Option(
                "--rate", "RATE", read_by(parse_rate), "100gbit", "each device's link (100gbit)"
            ),
            Option("--latency-us", "US", within(0.0, 1e6), 30.0, "of a move (30)"),
            Option("--batch", "N", within(0, 10**9), 0, "global (default: the largest measured)"),
            Option("--json", "FILE", writable_file, None, "write the plan, for the runtime"),
        )
    )
    return parser
