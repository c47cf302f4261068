"""What was predicted, as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence

from bytesched.sim.predict import Prediction
from bytesched.sim.verdict import rivals

__all__ = ["EXCHANGE_LEGEND", "LEGEND", "rows"]

_TITLES = ("ranks", "system", "size", "iteration ms", "x T*", "vs best", "collectives")
_EXCHANGE_TITLES = ("p50 ms", "p95 ms")

#: what the columns are, for beneath them
LEGEND = """
size: of DDP's buckets, or of chunks. x T*: over what no schedule can beat.
vs best: how many times as fast as the fastest other system whose predictions were calibrated.
*: not calibrated, that is never held against a measurement, or far from one; no verdict uses it.
collectives: all-reduces, or their halves, of an iteration."""
#: the same for profiles with layers of experts
EXCHANGE_LEGEND = """
size: of DDP's buckets, or of chunks, the largest. x T*: over what no schedule can beat; of
bytesched-pieces, none with all-to-alls in pieces, of the others none with whole ones.
vs best: how many times as fast as the fastest system of DDP's.
collectives: all-reduces, and all-to-alls or their pieces, of an iteration; p50, p95 ms: of these.
*: gradients are not sent, so the link is idle. Ranks are alike."""


def rows(found: Sequence[Sequence[Prediction]]) -> list[tuple[str, ...]]:
    """A row for each system and number of ranks, below the titles."""
    has_exchanges = any(one.exchange_p50_s for of_ranks in found for one in of_ranks)
    titles = _TITLES + _EXCHANGE_TITLES if has_exchanges else _TITLES
    lines: list[tuple[str, ...]] = [titles]
    for of_ranks in found:
        _, peer = rivals(of_ranks)
        for one in of_ranks:
            its = (
                str(one.ranks),
                one.system if one.calibrated else f"{one.system} *",
                one.chosen,
                f"{1e3 * one.iteration_s:.1f}",
                f"{one.to_optimum:.3f}",
                f"{peer.iteration_s / one.iteration_s:.2f}x" if peer else "",
                str(one.collectives),
            )
            lines.append(its + (_exchanges(one) if has_exchanges else ()))
    return lines


def _exchanges(one: Prediction) -> tuple[str, ...]:
    return f"{1e3 * one.exchange_p50_s:.1f}", f"{1e3 * one.exchange_p95_s:.1f}"
