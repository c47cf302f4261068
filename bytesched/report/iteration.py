"""The picture of an iteration before and after: compute, link and updates of two runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytesched.report.canvas import AFTER, BEFORE, GRID, INK, QUIET, canvas, say, strip
from bytesched.trace.reading import (
    Interval,
    Iteration,
    Span,
    Trace,
    read_traces,
    subtract,
    union,
)

TITLE = "An iteration and the forward pass after it"
FORWARD = "#52606d"
BACKWARD = BEFORE
UPDATE = AFTER
WAIT = "#d64545"
NEXT = "#f4f1ea"
#: Of the layers, from the first to the last.
FRONT_TO_BACK = ("#c1272d", "#ee7b3a", "#f7c548", "#8fc7b0", "#4a8db7", "#2b4c8c")
#: Two spans that touch may lie this far apart in the file.
ROUNDING_MS = 0.002
#: How much of the next iteration to show, as a share of this one.
MOST_OF_NEXT = 0.5
BAR_HEIGHT = 0.74
#: Heights above the rows of a panel, which are 0, 1 and 2.
NOTE_AT = 2.65
TITLE_AT = 3.1
SAVING_AT = 3.85
#: From which share of the width on there is room for words left of a line.
ROOM_FOR_NOTE = 0.28
ROOM_FOR_SAVING = 0.32


def draw_iteration(
    before_trace: Path, after_trace: Path, out_png: Path, *, before_name: str = "DDP"
) -> None:
    """Draw an iteration of two runs on one time axis, as PNG.

    Of each trace the iteration of median length in the later half is shown, of its first rank. The
    tracks read are ``forward``, ``backward``, ``send``, ``update`` and, where there is one,
    ``wait``; the argument ``chunk`` of a send counts from the back of the model. Raises
    ``PluginError`` without matplotlib, ``ValueError`` for a trace of less than three steps, and
    ``OSError`` if a file cannot be read or written.
    """
    before = view_iteration(read_traces(before_trace)[0], before_name)
    after = view_iteration(read_traces(after_trace)[0], "bytesched")
    with canvas(11.0, 6.1, out_png) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True)
        figure.subplots_adjust(left=0.075, right=0.985, top=0.815, bottom=0.125, hspace=0.68)
        figure.text(0.012, 0.955, TITLE, size=14, weight="bold", color=INK, va="center")
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
    step = {"color": INK, "linewidth": 1.2, "linestyle": (0, (4, 2)), "clip_on": False}
    axes.plot([view.step_ms] * 2, [-0.5, NOTE_AT + 0.25], **step)
    _draw_title(axes, view)


def _draw_link(axes: Any, view: IterationView) -> None:
    """Each transfer in the colours of its layers."""
    # A white line between two transfers, unless it would be wider than they are.
    lean_ms = axes.get_xlim()[1] * 0.003
    edges = []
    for (start, end), (front, back) in view.link:
        colours = _shades([front + (back - front) * step / 63 for step in range(64)])
        extent = (start, end, 1 - BAR_HEIGHT / 2, 1 + BAR_HEIGHT / 2)
        axes.imshow(colours[:, None, :], extent=extent, aspect="auto", zorder=1)
        edges.append("white" if end - start > lean_ms else colours[32])
    _draw_bars(axes, 1, [span for span, _ in view.link], ["none"], edges)


def _draw_title(axes: Any, view: IterationView) -> None:
    iteration, width_ms = view.iteration, axes.get_xlim()[1]
    title = axes.text(0, TITLE_AT, view.name, size=12, weight="bold", color=INK)
    waiting = f"{iteration.exposed_wait_ms:.0f} ms of it waiting"
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    style = {"xycoords": title, "size": 10, "color": QUIET, "va": "bottom", "bbox": behind}
    say(axes, f"{iteration.step_ms:.0f} ms per iteration, {waiting}", (1, 0), (9, 0), **style)
    note = "barrier: all sent, then step() returns"
    if iteration.crossed_ms:
        crossed = iteration.crossed_ms / iteration.link_busy_ms
        note = f"step() returns, {crossed:.0%} still to send"
    at, is_left = (view.step_ms, NOTE_AT), view.step_ms < ROOM_FOR_NOTE * width_ms
    say(axes, note, at, (5 if is_left else -5, 0), ha="left" if is_left else "right", color=INK)
    if not is_left and view.end_ms - view.step_ms > 0.1 * width_ms:
        say(axes, "next iteration", at, (5, 0), color=QUIET)


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


def _shades(depths: list[float]) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("layers", FRONT_TO_BACK)(depths)


def _draw_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    kinds = {"forward": FORWARD, "backward": BACKWARD, "wait": WAIT, "update": UPDATE}
    patches = [Patch(color=colour, label=words) for words, colour in kinds.items()]
    style = {"frameon": False, "fontsize": 9, "labelcolor": INK, "handlelength": 1.2}
    figure.legend(handles=patches, loc="lower left", bbox_to_anchor=(0.067, 0), ncols=4, **style)
    axes = figure.add_axes((0.55, 0.021, 0.1, 0.022))
    axes.set_axis_off()
    axes.imshow(_shades([step / 39 for step in range(40)])[None, :, :], aspect="auto")
    for words, x, side in (("front layers", -0.08, "right"), ("back layers", 1.08, "left")):
        where = {"transform": axes.transAxes, "ha": side, "va": "center"}
        axes.text(x, 0.4, words, size=9, color=INK, **where)


def _draw_saving(axes: Any, before: IterationView, after: IterationView) -> None:
    """Join the ends of the two iterations, above the lower panel."""
    saved_ms = before.step_ms - after.step_ms
    colour, words = (UPDATE, "saved") if saved_ms >= 0 else (WAIT, "lost")
    dotted = {"color": colour, "linewidth": 1.2, "linestyle": (0, (1, 1.5)), "clip_on": False}
    axes.plot([before.step_ms] * 2, (SAVING_AT - 0.2, SAVING_AT + 0.45), **dotted)
    axes.plot([after.step_ms] * 2, (2.9, SAVING_AT + 0.2), **dotted)
    arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
    ends = (after.step_ms, SAVING_AT), (before.step_ms, SAVING_AT)
    axes.annotate("", *ends, arrowprops=arrow, annotation_clip=False)
    saving = f"{abs(saved_ms):.0f} ms {words} per iteration ({abs(saved_ms) / before.step_ms:.0%})"
    style = {"size": 11, "weight": "bold", "color": colour, "va": "center"}
    style |= {"backgroundcolor": "white"}
    nearer_ms, middle_ms = min(before.step_ms, after.step_ms), (before.step_ms + after.step_ms) / 2
    if nearer_ms > ROOM_FOR_SAVING * axes.get_xlim()[1]:
        say(axes, saving, (nearer_ms, SAVING_AT), (-8, 0), ha="right", **style)
    else:
        say(axes, saving, (middle_ms, SAVING_AT), (0, 0), ha="center", **style)


@dataclass(frozen=True, slots=True)
class IterationView:
    """An iteration and the next forward pass, in ms since the step before it returned."""

    name: str
    iteration: Iteration
    #: when the next iteration's backward pass begins, or the picture ends before
    end_ms: float
    forward: list[Interval]
    backward: list[Interval]
    update: list[Interval]
    wait: list[Interval]
    #: when each transfer had the link, and its part of the model: 0 is the front, 1 the back
    link: list[tuple[Interval, Interval]]

    @property
    def step_ms(self) -> float:
        """Length of the iteration, when its step returned."""
        return self.iteration.step_ms


def view_iteration(trace: Trace, name: str) -> IterationView:
    """Return the iteration of median length; the one after it must be in the trace as well.

    Only the later half of the iterations counts: in the first ones, nothing is planned yet.
    """
    iterations = trace.iterations()
    if len(iterations) < 2:
        raise ValueError(f"the trace of {name} must hold at least three steps")
    later = iterations[(len(iterations) - 1) // 2 : -1]
    by_length = sorted(later, key=lambda iteration: iteration.step_ms)
    shown = by_length[(len(by_length) - 1) // 2]
    following = iterations[iterations.index(shown) + 1]
    next_backward = trace.intervals("backward", following.start_ms, following.end_ms)
    end_ms = next_backward[0][0] if next_backward else following.end_ms
    end_ms = min(end_ms, shown.end_ms + MOST_OF_NEXT * shown.step_ms)

    def shifted(spans: Iterable[Interval]) -> list[Interval]:
        return [(a - shown.start_ms, b - shown.start_ms) for a, b in union(spans, gap=ROUNDING_MS)]

    def track(name: str) -> list[Interval]:
        return trace.intervals(name, shown.start_ms, end_ms)

    wait = trace.waits(shown.start_ms, end_ms)
    return IterationView(
        name=name,
        iteration=shown,
        end_ms=end_ms - shown.start_ms,
        forward=shifted(subtract(track("forward"), wait)),
        backward=shifted(subtract(track("backward"), wait)),
        update=shifted(track("update")),
        wait=shifted(wait),
        link=_link(trace.track("send"), shown.start_ms, end_ms),
    )


def _link(sends: list[Span], start_ms: float, end_ms: float) -> list[tuple[Interval, Interval]]:
    """Return when each transfer had the link: of several in flight, the one that ends first."""
    chunks = 1 + max((int(span.args.get("chunk", 0)) for span in sends), default=0)
    turns: list[tuple[Interval, Interval]] = []
    free_ms = start_ms
    for span in sorted(sends, key=lambda span: span.end_ms):
        begin_ms = max(span.start_ms, free_ms)
        finish_ms = min(span.end_ms, end_ms)
        if finish_ms > begin_ms:
            chunk = int(span.args.get("chunk", 0))
            # They count as backward computes them.
            part = ((chunks - chunk - 1) / chunks, (chunks - chunk) / chunks)
            turns.append(((begin_ms - start_ms, finish_ms - start_ms), part))
            free_ms = finish_ms
    return turns
