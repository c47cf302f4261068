"""The picture of a plan: which device does what when, and what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytesched.burst.compare import Point
from bytesched.burst.cost import Task
from bytesched.burst.search import Found
from bytesched.report.canvas import AFTER, BEFORE, GRID, INK, QUIET, canvas, strip

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
