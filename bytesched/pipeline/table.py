"""The table of a plan: what it takes beside other orders, and what is known about better ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bytesched.pipeline.replay import Timeline
from bytesched.pipeline.search import Found
from bytesched.table import aligned
from bytesched.values import size_text

__all__ = ["lines"]


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
