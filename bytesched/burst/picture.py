"""The picture of a plan: which device does what when, and what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytesched.burst.compare import Point
from bytesched.burst.cost import Task
from bytesched.burst.search import Found
from bytesched.report.canvas import AFTER, BEFORE, GRID, INK, QUIET, canvas, strip
from bytesched.trace.intervals import Interval, clip, subtract
from bytesched.trace.reading import Trace

__all__ = ["draw_plan", "draw_run"]

_COLOURS = {"forward": AFTER, "backward": "#2c6e8f", "move": "#d9a441"}
_BACKGROUND = "#b565a7"
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


def draw_run(traces: Sequence[Trace], path: Path) -> None:
    """Draw the last two iterations of a run with a background job, a row for each rank, as PNG.

    Raises ``ValueError`` if there are none, ``PluginError`` without matplotlib and ``OSError`` if
    the file cannot be written.
    """
    iterations = traces[0].iterations()[-2:] if traces else []
    if not iterations:
        raise ValueError("holds no whole iteration")
    start_ms, end_ms = iterations[0].start_ms, iterations[-1].end_ms
    with canvas(_WIDTH_IN, 1.2 + 0.42 * len(traces), path) as figure:
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        axes = figure.subplots()
        for row, trace in enumerate(traces):
            waits = trace.intervals("wait", start_ms, end_ms)
            bars = {
                kind: subtract(trace.intervals(kind, start_ms, end_ms), waits)
                for kind in ("forward", "backward")
            }
            _bars(axes, row, bars["forward"], _COLOURS["forward"], start_ms)
            _bars(axes, row, bars["backward"], _COLOURS["backward"], start_ms)
            steps = clip(trace.intervals("background", start_ms, end_ms), start_ms, end_ms)
            _bars(axes, row, steps, _BACKGROUND, start_ms)
        for label, colour in (*list(_COLOURS.items())[:2], ("background", _BACKGROUND)):
            axes.plot([], [], color=colour, linewidth=6, label=label)
        strip(axes)
        axes.set_xlim(0, end_ms - start_ms)
        axes.set_ylim(len(traces) - 0.4, -0.6)
        axes.set_yticks(range(len(traces)), [f"rank {trace.rank}" for trace in traces])
        axes.set_xlabel("ms of two iterations; white: waiting", color=QUIET, size=9)
        _legend(axes)
        title = "What each rank did"
        axes.set_title(title, loc="left", size=12, weight="bold", color=INK)


def _bars(axes: Any, row: int, intervals: Sequence[Interval], colour: str, start_ms: float) -> None:
    bars = [(start - start_ms, end - start) for start, end in intervals]
    axes.broken_barh(bars, (row - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3)


def _legend(axes: Any) -> None:
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=3,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
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
