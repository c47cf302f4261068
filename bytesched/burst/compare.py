"""A plan beside what it competes with: plain data parallelism, and devices divided for good.

Throughput is counted in devices, as DeepPool does: a job that trains as fast as on one device of
its own adds 1. The background job needs one device; so the foreground adds (time on one device) /
(its time), and the background adds the share of time that it gets, summed over the devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bytesched.burst.cost import Place, PlacedBranches, Plan, Schedule, Task, schedule
from bytesched.burst.graph import Chain, Layer
from bytesched.burst.search import Found, fastest_plan
from bytesched.report.canvas import AFTER, BEFORE, GRID, INK, QUIET, canvas, strip

#: amplifications of a curve
_AMPLIFICATIONS = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Point:
    """One way to use the devices of a cluster."""

    label: str
    time_ns: int
    #: in devices
    foreground: float
    background: float

    @property
    def total(self) -> float:
        """Throughput of both jobs, in devices."""
        return self.foreground + self.background

    def to_json(self) -> dict[str, float | str]:
        """The point in a result file."""
        return {
            "label": self.label,
            "iteration_ms": self.time_ns / 1e6,
            "foreground_devices": round(self.foreground, 4),
            "background_devices": round(self.background, 4),
            "total_devices": round(self.total, 4),
        }


def uniform_plan(chain: Chain, place: Place) -> Plan:
    """Every layer on the same devices: data parallelism."""
    plan: list[Place | PlacedBranches] = []
    for item in chain:
        if isinstance(item, Layer):
            plan.append(place)
        else:
            branches = tuple(uniform_plan(branch, place) for branch in item.branches)
            plan.append(PlacedBranches(branches, (0,) * len(branches), place))
    return tuple(plan)


def gaps_ns(timeline: Schedule, devices: int) -> list[list[tuple[int, int]]]:
    """For each device, the stretches of an iteration in which it neither computes nor moves."""
    found = []
    for device in range(devices):
        free_ns, gaps = 0, []
        spans = [span for span in timeline.spans if span.device == device]
        for span in sorted(spans, key=lambda span: span.start_ns):
            if span.start_ns > free_ns:
                gaps.append((free_ns, span.start_ns))
            free_ns = max(free_ns, span.end_ns)
        if timeline.time_ns > free_ns:
            gaps.append((free_ns, timeline.time_ns))
        found.append(gaps)
    return found


def burst_point(task: Task, label: str, timeline: Schedule, step_ns: int) -> Point:
    """A plan with a background job on every device, in the gaps that whole steps fit into."""
    usable_ns = sum(
        (end - start) // step_ns * step_ns
        for gaps in gaps_ns(timeline, task.cluster.devices)
        for start, end in gaps
    )
    alone_ns = task.graph.single_device_ns
    return Point(label, timeline.time_ns, alone_ns / timeline.time_ns, usable_ns / timeline.time_ns)


def data_parallel(task: Task, width: int, label: str, background: int = 0) -> Point:
    """Data parallelism on so many devices, background jobs on others."""
    timeline = schedule(task, uniform_plan(task.graph.chain, Place(0, width)))
    foreground = task.graph.single_device_ns / timeline.time_ns
    return Point(label, timeline.time_ns, foreground, background)


def static_partitions(task: Task) -> Iterator[Point]:
    """The devices divided for good: data parallelism on some, background jobs on the others."""
    devices = task.cluster.devices
    for width in task.graph.widths(devices - 1):
        rest = devices - width
        yield data_parallel(task, width, f"static {width}/{rest}", background=rest)


def burst_curve(
    task: Task, step_ns: int, amplifications: Sequence[float] = _AMPLIFICATIONS
) -> Iterator[Point]:
    """The fastest plans for growing amplifications, with a background job."""
    for amplification in amplifications:
        found = fastest_plan(replace(task, amplification=amplification))
        yield burst_point(task, f"burst {amplification:g}", found.schedule, step_ns)


_COLOURS = {"forward": AFTER, "backward": "#2c6e8f", "move": "#d9a441"}
_WIDTH_IN = 12.0
_HEIGHT_IN = 4.2


def draw_plan(
    task: Task, found: Found, points: Sequence[Point], curve: Sequence[Point], path: Path
) -> None:
    """Draw a plan's timeline and, beside it, throughput over speed, as PNG.

    `points` ends with the plan itself. Raises ``PluginError`` without matplotlib and ``OSError``
    if the file cannot be written.
    """
    with canvas(_WIDTH_IN, _HEIGHT_IN, path) as figure:
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
        _draw_timeline(left, task, found)
        _draw_curve(right, task, points, curve)


def _legend(axes: Any) -> None:
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8, labelcolor=INK
    )


def _draw_timeline(axes: Any, task: Task, found: Found) -> None:
    timeline = found.schedule
    for kind, colour in _COLOURS.items():
        for device in range(task.cluster.devices):
            bars = [
                (span.start_ns / 1e6, (span.end_ns - span.start_ns) / 1e6)
                for span in timeline.spans
                if span.kind == kind and span.device == device
            ]
            axes.broken_barh(
                bars, (device - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3
            )
        axes.plot([], [], color=colour, linewidth=6, label=kind)
    strip(axes)
    axes.set_xlim(0, timeline.time_ns / 1e6)
    axes.set_ylim(task.cluster.devices - 0.4, -0.6)
    axes.set_yticks(range(task.cluster.devices))
    axes.set_ylabel("device", color=QUIET, size=9)
    axes.set_xlabel("ms of one iteration; white: left to another job", color=QUIET, size=9)
    _legend(axes)
    axes.set_title(
        f"{task.graph.name}, batch {task.graph.batch}: {timeline.time_ns / 1e6:.1f} ms",
        loc="left",
        size=12,
        weight="bold",
        color=INK,
    )


def _draw_curve(axes: Any, task: Task, points: Sequence[Point], curve: Sequence[Point]) -> None:
    strip(axes)
    axes.grid(color=GRID, linewidth=0.8)
    if curve:
        ordered = sorted(curve, key=lambda point: point.foreground)
        axes.plot(
            [point.foreground for point in ordered],
            [point.total for point in ordered],
            color=AFTER,
            linewidth=1.4,
            marker=".",
        )
    for index, point in enumerate(points):
        colour = AFTER if index == len(points) - 1 else BEFORE
        axes.plot(point.foreground, point.total, "o", color=colour, markersize=6)
        axes.annotate(
            point.label,
            (point.foreground, point.total),
            xytext=(5, 5 if index % 2 else -11),
            textcoords="offset points",
            size=8,
            color=INK,
        )
    axes.set_xlim(left=0)
    axes.set_ylim(0, task.cluster.devices + 0.6)
    axes.set_xlabel("speed of the foreground, in devices", color=QUIET, size=9)
    axes.set_ylabel("throughput of both jobs, in devices", color=QUIET, size=9)
    axes.set_title("Speed and throughput", loc="left", size=12, weight="bold", color=INK)
