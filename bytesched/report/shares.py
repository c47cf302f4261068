"""What an epoch on a graph goes to, on a rank."""

from __future__ import annotations

from typing import Final

from bytesched.trace.reading import Interval, Trace, clip, covered, subtract

#: what time goes to; waits count for what was waited for: halo or weights
KINDS: Final = ("aggregation", "transformation", "halo", "weights", "other")


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
