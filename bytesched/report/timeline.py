"""The picture of one iteration on all ranks: what computed when, and when something was sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bytesched.report.canvas import AFTER, BEFORE, GRID, INK, QUIET, canvas, strip
from bytesched.trace.reading import Iteration, Span, Trace, read_traces

__all__ = ["draw_timeline"]

#: what a span is, by the first word of its track or its name: its colour and its legend
KINDS = {
    "forward": ("#52606d", "forward"),
    "backward": (BEFORE, "backward"),
    "send": ("#f7c548", "sending"),
    "update": (AFTER, "update"),
    "wait": ("#d64545", "waiting"),
}
BAR_HEIGHT = 0.72
ROW_IN = 0.34
AROUND_IN = 1.15
#: a name is written into a bar that takes at least this share of the width
ROOM_FOR_NAME = 0.045


class _Row(NamedTuple):
    title: str
    bars: list[tuple[Span, str]]


def draw_timeline(
    trace: str | Path, out_png: str | Path, *, title: str = "One iteration", step: int | None = None
) -> None:
    """Draw one iteration of all ranks of a trace file, merged or not, as PNG.

    The iteration of median length on the first rank, unless ``step`` names one. A rank has one
    row for each of its waves, or one for its forward and backward passes, and one for each other
    track. Raises ``PluginError`` without matplotlib, ``ValueError`` if there is no such
    iteration, and ``OSError`` if a file cannot be read or written.
    """
    traces = read_traces(Path(trace))
    iteration = _chosen(traces[0], step)
    rows = [row for each in traces for row in _rows(each, iteration.start_ms, iteration.end_ms)]
    with canvas(11.0, AROUND_IN + ROW_IN * len(rows), Path(out_png)) as figure:
        height = figure.get_figheight()
        axes = figure.subplots()
        figure.subplots_adjust(left=0.13, right=0.985, top=1 - 0.72 / height, bottom=0.34 / height)
        figure.text(0.012, 1 - 0.22 / height, title, size=13, weight="bold", color=INK, va="center")
        axes.set_xlim(0, iteration.step_ms)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), [row.title for row in rows])
        strip(axes)
        axes.tick_params(axis="y", labelcolor=INK)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.xaxis.set_major_formatter("{x:.0f} ms")
        for number, row in enumerate(rows):
            _draw_row(axes, number, row, iteration)
        _draw_legend(figure, {kind for row in rows for _, kind in row.bars}, height)


def _chosen(trace: Trace, step: int | None) -> Iteration:
    iterations = trace.iterations()
    if step is not None:
        iterations = [iteration for iteration in iterations if iteration.step == step]
    if not iterations:
        which = "no whole iteration" if step is None else f"no whole iteration of step {step}"
        raise ValueError(f"the trace of rank {trace.rank} holds {which}")
    by_length = sorted(iterations, key=lambda iteration: iteration.step_ms)
    return by_length[len(by_length) // 2]


def _rows(trace: Trace, start_ms: float, end_ms: float) -> Iterator[_Row]:
    waves = sorted(track for track in trace.spans if track.startswith("wave "))
    computing = [[wave] for wave in waves] or [["forward", "backward", "wait"]]
    for tracks in [*computing, ["send"], ["update"]]:
        bars = [
            (span, track if track in KINDS else span.name.split()[0])
            for track in tracks
            for span in trace.track(track)
            if span.end_ms > start_ms and span.start_ms < end_ms
        ]
        bars = [(span, kind) for span, kind in bars if kind in KINDS]
        if bars:
            name = tracks[0] if len(tracks) == 1 else "compute"
            yield _Row(f"rank {trace.rank}: {name}", bars)


def _draw_row(axes: Any, number: int, row: _Row, iteration: Iteration) -> None:
    for span, kind in row.bars:
        start_ms = max(span.start_ms, iteration.start_ms) - iteration.start_ms
        end_ms = min(span.end_ms, iteration.end_ms) - iteration.start_ms
        axes.barh(
            number,
            end_ms - start_ms,
            left=start_ms,
            height=BAR_HEIGHT,
            color=KINDS[kind][0],
            edgecolor="white",
            linewidth=0.4,
        )
        name = span.name.removeprefix("partition ").removeprefix(f"{kind} ")
        if kind in {"forward", "backward"} and end_ms - start_ms > (
            ROOM_FOR_NAME * iteration.step_ms
        ):
            axes.text(
                (start_ms + end_ms) / 2,
                number,
                name,
                size=8,
                color="white",
                ha="center",
                va="center",
            )


def _draw_legend(figure: Any, kinds: set[str], height_in: float) -> None:
    at = 0.985
    for kind, (colour, meaning) in reversed(KINDS.items()):
        if kind in kinds:
            at -= 0.012 * len(meaning) + 0.03
            y = 1 - 0.22 / height_in
            figure.text(at, y, "■", size=11, color=colour, va="center")
            figure.text(at + 0.016, y, meaning, size=9, color=QUIET, va="center")
