"""What an epoch of full-graph training goes to, from the trace of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bytesched.report.canvas import AFTER, BEFORE, GRID, INK, canvas, strip
from bytesched.trace.intervals import Interval, clip, covered, subtract
from bytesched.trace.reading import Trace, read_traces

__all__ = ["COLOURS", "KINDS", "Shares", "draw_shares", "read_shares", "shares_of"]

#: What time goes to, in the order of bars.
KINDS: Final = ("aggregation", "transformation", "halo", "weights", "other")
COLOURS: Final = {
    "aggregation": "#52606d",
    "transformation": AFTER,
    "halo": "#d64545",
    "weights": "#f7c548",
    "other": GRID,
}
ROW_IN = 0.42
AROUND_IN = 1.2
#: a share is written into a bar that is at least so long
ROOM_FOR_SHARE = 0.04


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the epochs of one rank."""

    rank: int
    epochs: int
    #: mean length
    epoch_ms: float
    #: by kind; they sum to 1. Waits count for what was waited for: halo or weights
    of: dict[str, float]
    #: how long halos were on their way, whether or not something was computed meanwhile
    under_way: float


def shares_of(trace: Trace) -> Shares:
    """What the whole epochs of a trace go to, each of one step.

    Raises ``ValueError`` if there is none, or if nothing of a graph is in it.
    """
    if not trace.track("graph"):
        raise ValueError(
            f"the trace of rank {trace.rank} has no layer of bytesched.plugins.graphs in it"
        )
    epochs = trace.iterations()
    if not epochs:
        raise ValueError(f"the trace of rank {trace.rank} holds no whole epoch: it takes two steps")
    begin_ms, end_ms = epochs[0].start_ms, epochs[-1].end_ms
    whole_ms = end_ms - begin_ms

    def named(track: str, name: str) -> list[Interval]:
        spans = (span for span in trace.track(track) if span.name.startswith(name))
        return clip(((span.start_ms, span.end_ms) for span in spans), begin_ms, end_ms)

    # Weights are waited for inside of a layer, too: what is taken already counts once.
    taken = trace.intervals("wait", begin_ms, end_ms)
    of = {"weights": covered(taken) / whole_ms}
    for kind in ("halo", "aggregation", "transformation"):
        own = subtract(named("graph", kind), taken)
        of[kind] = covered(own) / whole_ms
        taken = [*taken, *own]
    of["other"] = 1.0 - covered(taken) / whole_ms
    return Shares(
        rank=trace.rank,
        epochs=len(epochs),
        epoch_ms=whole_ms / len(epochs),
        of={kind: of[kind] for kind in KINDS},
        under_way=covered(named("urgent", "halo")) / whole_ms,
    )


def read_shares(paths: Sequence[Path]) -> list[Shares]:
    """Those of all ranks in trace files. Raises ``OSError`` and ``ValueError``."""
    return [shares_of(trace) for path in paths for trace in read_traces(path)]


def draw_shares(bars: Sequence[tuple[str, Shares]], out_png: str | Path, *, title: str) -> None:
    """Draw one bar for each, with its name, as PNG.

    Raises ``PluginError`` without matplotlib and ``OSError`` if the file cannot be written.
    """
    with canvas(9.0, AROUND_IN + ROW_IN * len(bars), Path(out_png)) as figure:
        height = figure.get_figheight()
        axes = figure.subplots()
        figure.subplots_adjust(left=0.24, right=0.97, top=1 - 0.75 / height, bottom=0.34 / height)
        figure.text(0.012, 1 - 0.22 / height, title, size=12, weight="bold", color=INK, va="center")
        axes.set_xlim(0, 1)
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.set_yticks(range(len(bars)), [name for name, _ in bars])
        strip(axes)
        axes.tick_params(axis="y", labelcolor=INK)
        axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        for row, (_, shares) in enumerate(bars):
            _draw_bar(axes, row, shares)
        handles, labels = axes.get_legend_handles_labels()
        first = dict(zip(labels, handles, strict=True))
        first["on its way"] = first.pop("on its way")
        figure.legend(
            first.values(),
            first.keys(),
            ncols=len(first),
            loc="upper left",
            bbox_to_anchor=(0.19, 1 - 0.34 / height),
            frameon=False,
            fontsize=9,
        )


def _draw_bar(axes: Any, row: int, shares: Shares) -> None:
    at = 0.0
    for kind, share in shares.of.items():
        axes.barh(row, share, left=at, height=0.72, color=COLOURS[kind], label=kind)
        if share >= ROOM_FOR_SHARE:
            light = kind in {"weights", "other"}
            axes.text(
                at + share / 2,
                row,
                f"{share:.0%}",
                size=8.5,
                color=INK if light else "white",
                ha="center",
                va="center",
            )
        at += share
    # How long halos were on their way, hidden or not.
    axes.plot(
        [0, shares.under_way], [row + 0.43] * 2, color=BEFORE, linewidth=1.6, label="on its way"
    )
