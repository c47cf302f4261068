"""What a plan came to: a table beside other orders, and a picture of who computes what when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from bytesched.pipeline.order import Kind
from bytesched.pipeline.replay import Timeline
from bytesched.pipeline.search import Found
from bytesched.report.canvas import AFTER, INK, QUIET, canvas, strip
from bytesched.table import aligned
from bytesched.values import size_text

_COLOURS = {
    Kind.FORWARD: (AFTER, "forward"),
    Kind.BACKWARD: ("#2c6e8f", "backward"),
    Kind.INPUT_GRADIENT: ("#2c6e8f", "input gradient"),
    Kind.WEIGHT_GRADIENT: ("#8fb8cc", "weight gradient"),
}
_LINK = {"transfer": "#d9a441", "reduction": "#b565a7"}
_WIDTH_IN = 12.0
#: beyond, numbers of micro-batches would lie on each other
_MOST_NUMBERED = 400


def lines(
    found: Found, others: Mapping[str, Timeline | str], memory_bytes: int | None
) -> Iterator[str]:
    """The lines that the command prints.

    Args:
        others: by name, timelines of other orders, or why there is none.
    """
    rows: list[tuple[str, ...]] = [
        ("order", "ms", "bubbles", "memory", "busiest link", "vs planned")
    ]
    planned_s = found.timeline.end_s
    rows.append(_row("planned", found.timeline, planned_s))
    reasons = []
    for name, timeline in others.items():
        if isinstance(timeline, str):
            reasons.append(timeline)
            continue
        mark = "" if memory_bytes is None or max(timeline.peak_bytes) <= memory_bytes else " *"
        rows.append(_row(name + mark, timeline, planned_s))
    yield from aligned(rows, "<>>>>>")
    if any(row[0].endswith("*") for row in rows):
        yield "* holds more than --memory allows."
    yield from reasons
    yield ""
    pattern = found.repetend
    idle = "no bubbles" if pattern.full else "with bubbles on every rank"
    if not pattern.full:
        idle += ", the shortest " + ("within the memory" if pattern.shortest else "that was found")
    least = "the least that is possible" if pattern.proved else "the least that was found"
    yield (
        f"repetend: {pattern.period * found.ticks.tick_s * 1e3:.4g} ms for each micro-batch, "
        f"{idle}; holds {size_text(pattern.memory_bytes)}, {least} at that pace"
    )
    if found.gap == 0:
        yield f"proved: no order of these stages ends before {found.bound_s * 1e3:.4g} ms"
    else:
        yield (
            f"not proved: no order ends before {found.bound_s * 1e3:.4g} ms, so that at most "
            f"{found.gap:.1%} could be gained"
        )
    if not found.ticks.exact:
        yield f"the search rounds times to {found.ticks.tick_s * 1e3:.3g} ms; the table does not"
    if found.cut_short:
        yield "the time limit ended the search: another run may find another order"


def _row(name: str, timeline: Timeline, planned_s: float) -> tuple[str, ...]:
    link = max(map(timeline.link_share, range(len(timeline.peak_bytes))))
    return (
        name,
        f"{timeline.end_s * 1e3:.2f}",
        f"{timeline.bubble_share:.1%}",
        size_text(max(timeline.peak_bytes)),
        f"{link:.0%}",
        f"{timeline.end_s / planned_s:.2f}x",
    )


def draw(timeline: Timeline, title: str, path: Path) -> None:
    """Draw a timeline as PNG. Raises ``PluginError`` without matplotlib, ``OSError`` as writing."""
    ranks = len(timeline.peak_bytes)
    with canvas(_WIDTH_IN, 1.4 + 0.6 * ranks, path) as figure:
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        axes = figure.subplots()
        kinds = {span.action.kind for span in timeline.spans}
        for kind in (kind for kind in Kind if kind in kinds):
            colour, label = _COLOURS[kind]
            for rank in range(ranks):
                bars = [
                    (span.start_s * 1e3, (span.end_s - span.start_s) * 1e3)
                    for span in timeline.spans
                    if span.rank == rank and span.action.kind is kind
                ]
                axes.broken_barh(
                    bars, (rank - 0.4, 0.6), color=colour, edgecolor="white", linewidth=0.5
                )
            axes.plot([], [], color=colour, linewidth=6, label=label)
        if len(timeline.spans) <= _MOST_NUMBERED:
            for span in timeline.spans:
                axes.text(
                    (span.start_s + span.end_s) * 500,
                    span.rank - 0.1,
                    str(span.action.micro_batch),
                    ha="center",
                    va="center",
                    fontsize=6,
                    color="white",
                    clip_on=True,
                )
        carried = [("transfer", t.source, t.start_s, t.end_s) for t in timeline.transfers]
        carried += [("reduction", r.rank, r.start_s, r.end_s) for r in timeline.reductions]
        for what, rank, start_s, end_s in carried:
            bar = (start_s * 1e3, (end_s - start_s) * 1e3)
            axes.broken_barh([bar], (rank + 0.22, 0.14), color=_LINK[what])
        for what in dict.fromkeys(what for what, *_ in carried):
            axes.plot([], [], color=_LINK[what], linewidth=3, label=what)
        strip(axes)
        axes.set_xlim(0, timeline.end_s * 1e3)
        axes.set_ylim(ranks - 0.4, -0.6)
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.set_xlabel("ms of an iteration; white: idle; below: the link", color=QUIET, size=9)
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=6,
            frameon=False,
            fontsize=8,
            labelcolor=INK,
        )
        axes.set_title(title, loc="left", size=12, weight="bold", color=INK)
