"""Arithmetic on intervals of time."""

from __future__ import annotations

from collections.abc import Iterable

#: Start and end.
Interval = tuple[float, float]


def union(spans: Iterable[Interval], *, gap: float = 0.0) -> list[Interval]:
    """Return disjoint intervals, sorted, that cover the same; gaps up to ``gap`` are closed."""
    joined: list[Interval] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > start:
            joined.append((start, end))
    return joined


def subtract(spans: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """Return what the spans cover and the holes do not, disjoint and sorted."""
    left: list[Interval] = []
    closed = union(holes)
    for start, end in union(spans):
        for hole_start, hole_end in closed:
            if hole_end <= start or hole_start >= end:
                continue
            if hole_start > start:
                left.append((start, hole_start))
            start = hole_end
        if end > start:
            left.append((start, end))
    return left


def clip(spans: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Return the parts that lie between two moments, sorted."""
    return sorted((max(a, start), min(b, end)) for a, b in spans if a < end and b > start)


def covered(spans: Iterable[Interval]) -> float:
    """Return the length of the union."""
    return sum(end - start for start, end in union(spans))
