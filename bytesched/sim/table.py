"""What was predicted, as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence

from bytesched.sim.predict import Prediction
from bytesched.sim.verdict import rivals

__all__ = ["LEGEND", "rows"]

_TITLES = (
    *("ranks", "system", "size", "iteration ms", "x T*", "vs best", "collectives"),
    *("words", "of rank 0", "KB", "replayed"),
)


#: what the columns are, for beneath them
LEGEND = """
size: of DDP's buckets, or of chunks. x T*: over what no schedule can beat.
vs best: how many times as fast as the fastest other system whose predictions were calibrated.
*: not calibrated, that is never held against a measurement, or far from one; no verdict uses it.
collectives: all-reduces, or their halves, of an iteration.
words, of rank 0, KB: messages that carry the order of an iteration, those that rank 0 sends, and
their size, on average. replayed: share of the iterations in which ranks repeat an order that they
know and send no words."""


def rows(found: Sequence[Sequence[Prediction]]) -> list[tuple[str, ...]]:
    """A row for each system and number of ranks, below the titles.

    Words are messages of the leader per iteration, of all ranks and of rank 0, and their bytes.
    """
    lines: list[tuple[str, ...]] = [_TITLES]
    for of_ranks in found:
        _, peer = rivals(of_ranks)
        for one in of_ranks:
            led = one.messages or one.replayed
            lines.append(
                (
                    str(one.ranks),
                    one.system if one.calibrated else f"{one.system} *",
                    one.chosen,
                    f"{1e3 * one.iteration_s:.1f}",
                    f"{one.to_optimum:.3f}",
                    f"{peer.iteration_s / one.iteration_s:.2f}x" if peer else "",
                    str(one.collectives),
                    f"{one.messages:.0f}" if led else "",
                    f"{one.busiest_messages:.0f}" if led else "",
                    f"{one.message_bytes / 1e3:.1f}" if led else "",
                    f"{100 * one.replayed:.0f}%" if led else "",
                )
            )
    return lines
