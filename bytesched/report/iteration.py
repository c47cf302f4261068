"""The picture of an iteration before and after: compute, link and updates of two runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytesched.report.canvas import AFTER, BEFORE, GRID, INK, QUIET, canvas, strip
from bytesched.report.iteration_view import IterationView, view_iteration
from bytesched.trace.intervals import Interval, clip, covered, union
from bytesched.trace.reading import read_traces

__all__ = ["draw_iteration"]

FORWARD = "#52606d"
BACKWARD = BEFORE
UPDATE = AFTER
WAIT = "#d64545"
NEXT = "#f4f1ea"
#: Of the layers, from the first to the last.
FRONT_TO_BACK = ("#c1272d", "#ee7b3a", "#f7c548", "#8fc7b0", "#4a8db7", "#2b4c8c")
BAR_HEIGHT = 0.74
#: Heights above the rows of a panel, which are 0, 1 and 2.
NOTE_AT = 2.65
TITLE_AT = 3.1
SAVING_AT = 3.85
#: From which share of the width on there is room for words left of a line.
ROOM_FOR_NOTE = 0.28
ROOM_FOR_SAVING = 0.32
#: Fewer transfers than this are drawn in the colours of all their layers.
MANY_TRANSFERS = 12


def draw_iteration(
    before_trace: str | Path,
    after_trace: str | Path,
    out_png: str | Path,
    *,
    title: str = "An iteration and the forward pass after it",
    before_name: str = "DDP",
    after_name: str = "bytesched",
) -> None:
    """Draw an iteration of two runs on one time axis, as PNG.

    Of each trace the iteration of median length in the later half is shown, of its first rank. The
    tracks read are ``forward``, ``backward``, ``send``, ``update`` and, where there is one,
    ``wait``; the argument ``chunk`` of a send counts from the back of the model. Raises
    ``PluginError`` without matplotlib, ``ValueError`` for a trace of less than three steps, and
    ``OSError`` if a file cannot be read or written.
    """
    before = view_iteration(read_traces(Path(before_trace))[0], before_name)
    after = view_iteration(read_traces(Path(after_trace))[0], after_name)
    with canvas(11.0, 6.1, Path(out_png)) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True)
        figure.subplots_adjust(left=0.075, right=0.985, top=0.815, bottom=0.125, hspace=0.68)
        figure.text(0.012, 0.955, title, size=14, weight="bold", color=INK, va="center")
        _draw_legend(figure)
        upper.set_xlim(0, max(before.end_ms, after.end_ms))
        for axes, view in ((upper, before), (lower, after)):
            _draw_view(axes, view)
        lower.xaxis.set_major_formatter("{x:.0f} ms")
        _draw_saving(lower, before, after)


def _draw_view(axes: Any, view: IterationView) -> None:
    axes.set_autoscale_on(False)
    axes.set_ylim(-0.5, 2.5)
    axes.set_yticks([2, 1, 0], ["compute", "link", "update"], size=10)
    strip(axes)
    axes.tick_params(axis="y", labelcolor=INK, labelsize=10, pad=6)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.axvspan(view.step_ms, view.end_ms, color=NEXT, linewidth=0, zorder=0)
    for row, spans, colour in (
        (2, view.forward, FORWARD),
        (2, view.backward, BACKWARD),
        (2, view.wait, WAIT),
        (0, view.update, UPDATE),
    ):
        # Updates are short and must be seen; waits are not to look longer than they are.
        edge = "none" if colour == WAIT else colour
        _draw_bars(axes, row, spans, [colour], [edge])
    _draw_link(axes, view)
    axes.plot(
        [view.step_ms] * 2,
        [-0.5, NOTE_AT + 0.25],
        color=INK,
        linewidth=1.2,
        linestyle=(0, (4, 2)),
        clip_on=False,
    )
    _label_bars(axes, view)
    _draw_title(axes, view)


def _draw_link(axes: Any, view: IterationView) -> None:
    turns = [span for span, _ in view.link]
    shades = _shades([(front + back) / 2 for _, (front, back) in view.link])
    # A white line between two transfers, unless it would be wider than they are.
    lean_ms = axes.get_xlim()[1] * 0.003
    edges = [
        "white" if end - start > lean_ms else shade
        for (start, end), shade in zip(turns, shades, strict=True)
    ]
    if len({part for _, part in view.link}) >= MANY_TRANSFERS:
        _draw_bars(axes, 1, turns, shades, edges)
        return
    for (start, end), (front, back) in view.link:
        layers = _shades([front + (back - front) * step / 63 for step in range(64)])
        axes.imshow(
            layers[:, None, :],
            extent=(start, end, 1 - BAR_HEIGHT / 2, 1 + BAR_HEIGHT / 2),
            aspect="auto",
            zorder=1,
        )
    _draw_bars(axes, 1, turns, ["none"], edges)


def _draw_title(axes: Any, view: IterationView) -> None:
    iteration = view.iteration
    title = axes.text(0, TITLE_AT, view.name, size=12, weight="bold", color=INK)
    axes.annotate(
        f"{iteration.step_ms:.0f} ms per iteration, "
        f"{iteration.exposed_wait_ms:.0f} ms of it waiting",
        (1, 0),
        xycoords=title,
        xytext=(9, 0),
        textcoords="offset points",
        size=10,
        color=QUIET,
        va="bottom",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    crossed = iteration.crossed_ms / iteration.link_busy_ms if iteration.link_busy_ms else 0.0
    note = (
        f"step() returns, {crossed:.0%} still to send"
        if crossed
        else "barrier: all sent, then step() returns"
    )
    at = view.step_ms / axes.get_xlim()[1]
    if at < ROOM_FOR_NOTE:
        _note(axes, view.step_ms, note, "left", INK)
    else:
        _note(axes, view.step_ms, note, "right", INK)
        if view.end_ms / axes.get_xlim()[1] - at > 0.1:
            _note(axes, view.step_ms, "next iteration", "left", QUIET)


def _note(axes: Any, at_ms: float, words: str, side: str, colour: str) -> None:
    axes.annotate(
        words,
        (at_ms, NOTE_AT),
        xytext=(5 if side == "left" else -5, 0),
        textcoords="offset points",
        size=9,
        color=colour,
        ha=side,
        annotation_clip=False,
    )


def _draw_bars(
    axes: Any, row: int, spans: list[Interval], colours: Sequence[Any], edges: Sequence[Any]
) -> None:
    axes.broken_barh(
        [(start, end - start) for start, end in spans],
        (row - BAR_HEIGHT / 2, BAR_HEIGHT),
        facecolors=colours,
        edgecolors=edges,
        linewidth=0.5,
    )


def _label_bars(axes: Any, view: IterationView) -> None:
    """Write what a stretch is where there is room for the words."""
    from matplotlib.patheffects import withStroke

    width_ms = axes.get_xlim()[1]
    for row, spans, words, colour, gap in (
        (2, view.forward, "forward", FORWARD, 0.04),
        (2, view.backward, "backward", BACKWARD, 0.04),
        (2, view.wait, "wait", WAIT, 0.003),
    ):
        for start, end in union(spans, gap=width_ms * gap):
            filled = covered(clip(spans, start, end)) > 0.6 * (end - start)
            if filled and end - start > width_ms * 0.012 * len(words):
                axes.text(
                    (start + end) / 2,
                    row - 0.02,
                    words,
                    size=9.5,
                    color="white",
                    ha="center",
                    va="center",
                    path_effects=[withStroke(linewidth=4, foreground=colour)],
                )


def _shades(depths: list[float]) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("layers", FRONT_TO_BACK)(depths)


def _draw_legend(figure: Any) -> None:
    axes = figure.add_axes((0.075, 0.015, 0.60, 0.055))
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 1)
    at = 0.0
    for words, colour in (
        ("forward", FORWARD),
        ("backward", BACKWARD),
        ("wait", WAIT),
        ("update", UPDATE),
    ):
        axes.broken_barh([(at, 1.8)], (0.28, 0.44), facecolors=colour)
        axes.text(at + 2.4, 0.47, words, size=9, color=INK, va="center")
        at += 4.6 + 1.25 * len(words)
    axes.text(at, 0.47, "front layers", size=9, color=INK, va="center")
    steps = 40
    axes.broken_barh(
        [(at + 12.5 + index * 0.3, 0.31) for index in range(steps)],
        (0.28, 0.44),
        facecolors=_shades([index / (steps - 1) for index in range(steps)]),
    )
    axes.text(at + 25.5, 0.47, "back layers", size=9, color=INK, va="center")


def _draw_saving(axes: Any, before: IterationView, after: IterationView) -> None:
    """Join the ends of the two iterations, above the lower panel."""
    saved_ms = before.step_ms - after.step_ms
    colour, words = (UPDATE, "saved") if saved_ms >= 0 else (WAIT, "lost")
    for end_ms, reach in (
        (before.step_ms, (SAVING_AT - 0.2, SAVING_AT + 0.45)),
        (after.step_ms, (2.9, SAVING_AT + 0.2)),
    ):
        axes.plot(
            [end_ms] * 2, reach, color=colour, linewidth=1.2, linestyle=(0, (1, 1.5)), clip_on=False
        )
    axes.annotate(
        "",
        (after.step_ms, SAVING_AT),
        (before.step_ms, SAVING_AT),
        arrowprops={
            "arrowstyle": "-|>",
            "color": colour,
            "linewidth": 1.8,
            "shrinkA": 0,
            "shrinkB": 0,
        },
        annotation_clip=False,
    )
    nearer_ms = min(before.step_ms, after.step_ms)
    beside = nearer_ms > ROOM_FOR_SAVING * axes.get_xlim()[1]
    axes.annotate(
        f"{abs(saved_ms):.0f} ms {words} per iteration ({abs(saved_ms) / before.step_ms:.0%})",
        (nearer_ms if beside else (before.step_ms + after.step_ms) / 2, SAVING_AT),
        xytext=(-8 if beside else 0, 0),
        textcoords="offset points",
        size=11,
        weight="bold",
        color=colour,
        backgroundcolor="white",
        ha="right" if beside else "center",
        va="center",
        annotation_clip=False,
    )
