"""The picture of an order: what each rank computes when, and what its link carries then."""

from __future__ import annotations

from pathlib import Path

from bytesched.pipeline.order import Kind
from bytesched.pipeline.replay import Timeline
from bytesched.report.canvas import AFTER, INK, QUIET, canvas, strip

__all__ = ["draw"]

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
        carried = [("transfer", each.source, each) for each in timeline.transfers]
        carried += [("reduction", each.rank, each) for each in timeline.reductions]
        for what, rank, each in carried:
            bar = (each.start_s * 1e3, (each.end_s - each.start_s) * 1e3)
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
