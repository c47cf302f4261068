"""What an epoch of full-graph training goes to, from the trace of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bytesched.trace.reading import Interval, Trace, clip, covered, subtract

#: What time goes to.
KINDS: Final = ("aggregation", "transformation", "halo", "weights", "other")


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the epochs of one rank."""

    rank: int
    #: by kind; they sum to 1. Waits count for what was waited for: halo or weights
    of: dict[str, float]
    #: how long halos were on their way, whether or not something was computed meanwhile
    under_way: float


def shares_of(trace: Trace) -> Shares:
    """What the whole epochs of a trace go to, each of one step; ``ValueError`` if it has none."""
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
        of={kind: of[kind] for kind in KINDS},
        under_way=covered(named("urgent", "halo")) / whole_ms,
    )
