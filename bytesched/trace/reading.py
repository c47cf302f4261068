"""What is in trace files: the spans and iterations of each rank, and several files as one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

#: One entry of a Chrome trace.
Event = dict[str, Any]
#: Name of the metadata event that ties a file's clock to the world's.
ANCHOR = "bytesched_clock"


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


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a track, in ms since the file began."""

    start_ms: float
    end_ms: float
    name: str
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Iteration:
    """What lies between the returns of two steps of the optimizer.

    ``crossed_ms`` is how long the link was busy before the first backward span: it then carried
    gradients of the iteration before, for which a barrier would have waited.
    """

    step: int
    start_ms: float
    end_ms: float
    link_busy_ms: float
    exposed_wait_ms: float
    crossed_ms: float

    @property
    def step_ms(self) -> float:
        """Its whole length."""
        return self.end_ms - self.start_ms


@dataclass
class Trace:
    """The events of one rank."""

    rank: int
    spans: dict[str, list[Span]] = field(default_factory=dict)
    #: number of each step and when it returned, in ms
    steps: list[tuple[int, float]] = field(default_factory=list)

    def track(self, name: str) -> list[Span]:
        """Return the spans of one track by their start; none if there is no such track."""
        return self.spans.get(name, [])

    def iterations(self) -> list[Iteration]:
        """Return every iteration of which both ends are in the trace."""
        return [
            self._iteration(step, start_ms, end_ms)
            for (_, start_ms), (step, end_ms) in zip(self.steps, self.steps[1:], strict=False)
        ]

    def intervals(self, track: str, start_ms: float, end_ms: float) -> list[Interval]:
        """Return what a track covers between two moments, sorted; spans may overlap."""
        spans = ((span.start_ms, span.end_ms) for span in self.track(track))
        return clip(spans, start_ms, end_ms)

    def waits(self, start_ms: float, end_ms: float) -> list[Interval]:
        """Return when training waited for the link; where none was recorded, as a plain run does,
        that is when the link was busy and nothing computed."""
        if self.track("wait"):
            return self.intervals("wait", start_ms, end_ms)
        computing = (
            self.intervals(track, start_ms, end_ms) for track in ("forward", "backward", "update")
        )
        return subtract(self.intervals("send", start_ms, end_ms), chain(*computing))

    def _iteration(self, step: int, start_ms: float, end_ms: float) -> Iteration:
        busy = self.intervals("send", start_ms, end_ms)
        backward = self.intervals("backward", start_ms, end_ms)
        first_backward_ms = backward[0][0] if backward else start_ms
        return Iteration(
            step=step,
            start_ms=start_ms,
            end_ms=end_ms,
            link_busy_ms=covered(busy),
            exposed_wait_ms=covered(self.waits(start_ms, end_ms)),
            crossed_ms=covered(clip(busy, start_ms, first_backward_ms)),
        )


def load_events(path: Path) -> tuple[list[Event], bool]:
    """Return the events of a Chrome trace file and whether the file was whole.

    Of a file of ours that breaks off, the events before the break are returned. Raises ``OSError``
    if it cannot be read and ``ValueError`` if it holds no event at all.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("not a text file") from error
    try:
        content, whole = json.loads(text), True
    except json.JSONDecodeError:
        content, whole = _whole_lines(text), False
    if isinstance(content, dict):
        content = content.get("traceEvents")
    events = [event for event in content if _is_event(event)] if isinstance(content, list) else []
    if not events:
        raise ValueError("holds no trace event")
    return events, whole


def _is_event(value: object) -> bool:
    kinds: dict[str, Any] = {"ts": int | float, "dur": int | float, "args": dict}
    return (
        isinstance(value, dict)
        and isinstance(value.get("ph"), str)
        and all(isinstance(value[name], kind) for name, kind in kinds.items() if name in value)
    )


def _whole_lines(text: str) -> list[Any]:
    """What `Timeline` wrote, an event in each line, up to one that is none."""
    values: list[Any] = []
    with suppress(json.JSONDecodeError):
        for line in text.splitlines()[1:]:
            values.append(json.loads(line.removesuffix(",")))
    return values


def read_traces(path: Path) -> list[Trace]:
    """Return the ranks of a trace file, merged or not, in their order.

    Raises ``OSError`` if it cannot be read and ``ValueError`` if bytesched did not write it.
    """
    try:
        events, _ = load_events(path)
        if not any(event.get("name") == ANCHOR for event in events):
            raise ValueError("not a trace written by bytesched")
        return traces_of(events)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = error if isinstance(error, ValueError) else "not a trace written by bytesched"
        raise ValueError(f"{path}: {why}") from error


def traces_of(events: Iterable[Event]) -> list[Trace]:
    """Return the ranks of events, in their order."""
    traces: dict[int, Trace] = {}
    for event in events:
        rank = int(event.get("pid", 0))
        trace = traces.setdefault(rank, Trace(rank))
        if event["ph"] == "X":
            # In whole nanoseconds, so that what touched when it was recorded still does.
            start_ns, took_ns = (round(1e3 * event.get(key, 0)) for key in ("ts", "dur"))
            times_ms = start_ns / 1e6, (start_ns + took_ns) / 1e6
            span = Span(*times_ms, str(event.get("name")), event.get("args", {}))
            trace.spans.setdefault(str(event.get("cat")), []).append(span)
        elif event["ph"] == "i" and "step" in event.get("args", {}):
            trace.steps.append((int(event["args"]["step"]), round(1e3 * event.get("ts", 0)) / 1e6))
    for trace in traces.values():
        trace.steps.sort(key=lambda step: step[1])
        for spans in trace.spans.values():
            spans.sort(key=lambda span: (span.start_ms, span.end_ms))
    return [traces[rank] for rank in sorted(traces)]


def merge_traces(paths: Sequence[Path]) -> tuple[list[Event], list[str]]:
    """Return the events of all ranks on one clock, and a line for each file that had a defect.

    The clock is rank 0's wall clock, zero where the earliest file began. A file that cannot be
    read, is no trace of bytesched or repeats a rank is left out.
    """
    complaints: list[str] = []
    ranks: dict[int, Path] = {}
    parts: list[tuple[int, list[Event]]] = []
    for path in paths:
        try:
            events, whole = load_events(path)
            began_ns, rank = _anchor(events)
        except (OSError, ValueError) as error:
            complaints.append(f"{path}: left out: {error}")
            continue
        if rank in ranks:
            complaints.append(f"{path}: left out: rank {rank} is already there, from {ranks[rank]}")
            continue
        if not whole:
            complaints.append(f"{path}: cut off; the {len(events)} events before the cut are used")
        ranks[rank] = path
        parts.append((began_ns, events))
    first_ns = min((began_ns for began_ns, _ in parts), default=0)
    merged = [
        {**event, "ts": round(event["ts"] + (began_ns - first_ns) / 1e3, 3)}
        if "ts" in event
        else event
        for began_ns, events in parts
        for event in events
    ]
    return merged, complaints


def _anchor(events: Iterable[Event]) -> tuple[int, int]:
    """Return when a file began, in ns of rank 0's wall clock, and its rank."""
    anchors = [event["args"] for event in events if event.get("name") == ANCHOR]
    if not anchors:
        raise ValueError("not a trace written by bytesched")
    if len(anchors) > 1:
        raise ValueError("already a merged trace")
    args = anchors[0]
    return int(args["wall_ns"]) + int(args["clock_offset_ns"]), int(args["rank"])
