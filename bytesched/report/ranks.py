"""What each rank of a run did: the picture of it, and what an epoch on a graph goes to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bytesched.report.canvas import AFTER, INK, QUIET, canvas, strip
from bytesched.trace.reading import Interval, Trace, clip, covered, subtract

#: what time goes to; waits count for what was waited for: halo or weights
KINDS: Final = ("aggregation", "transformation", "halo", "weights", "other")
#: a track: its colour, and where in the row of a rank it is drawn
_TRACKS = {
    "forward": (AFTER, (-0.4, 0.7)),
    "backward": ("#2c6e8f", (-0.4, 0.7)),
    "update": (INK, (-0.4, 0.7)),
    "background": ("#b565a7", (-0.4, 0.7)),
    "send": ("#d9a441", (0.32, 0.14)),
}


def draw_ranks(traces: Sequence[Trace], path: Path) -> None:
    """Draw the last two iterations of a run, a row for each rank, as PNG.

    Raises ``ValueError`` if there are none, ``PluginError`` without matplotlib and ``OSError`` if
    the file cannot be written.
    """
    iterations = traces[0].iterations()[-2:] if traces else []
    if not iterations:
        raise ValueError("the trace holds no whole iteration, which takes two steps")
    start_ms, end_ms = iterations[0].start_ms, iterations[-1].end_ms
    with canvas(12.0, 1.2 + 0.42 * len(traces), path) as figure:
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        axes = figure.subplots()
        for track, (colour, (low, height)) in _TRACKS.items():
            for row, trace in enumerate(traces):
                waits = trace.intervals("wait", start_ms, end_ms) if low < 0 else []
                spans = subtract(trace.intervals(track, start_ms, end_ms), waits)
                bars = [(start - start_ms, end - start) for start, end in spans]
                axes.broken_barh(bars, (row + low, height), color=colour)
            if any(trace.track(track) for trace in traces):
                axes.plot([], [], color=colour, linewidth=6, label=track)
        strip(axes)
        axes.set_xlim(0, end_ms - start_ms)
        axes.set_ylim(len(traces) - 0.4, -0.6)
        axes.set_yticks(range(len(traces)), [f"rank {trace.rank}" for trace in traces])
        axes.set_xlabel("ms of two iterations; white: waiting", color=QUIET, size=9)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, frameon=False, fontsize=8)


def shares_of(trace: Trace) -> dict[str, float]:
    """What the whole epochs of a trace go to, each of one step: shares of `KINDS` that sum to 1.

    And how long halos were "on its way", whether or not something was computed meanwhile. Raises
    ``ValueError`` if there is no whole epoch.
    """
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
    shares = {"weights": covered(taken) / whole_ms}
    for kind in ("halo", "aggregation", "transformation"):
        own = subtract(named("graph", kind), taken)
        shares[kind] = covered(own) / whole_ms
        taken = [*taken, *own]
    shares["other"] = 1.0 - covered(taken) / whole_ms
    on_its_way = covered(named("urgent", "halo")) / whole_ms
    return {kind: shares[kind] for kind in KINDS} | {"on its way": on_its_way}
