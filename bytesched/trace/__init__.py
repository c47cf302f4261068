"""What happened: a Chrome trace per rank, written while training, read afterwards."""

from __future__ import annotations

from bytesched.trace.observers import observers_of
from bytesched.trace.reading import Iteration, Span, Trace, merge_traces, read_traces
from bytesched.trace.timeline import Timeline, trace_name

__all__ = [
    "Iteration",
    "Span",
    "Timeline",
    "Trace",
    "merge_traces",
    "observers_of",
    "read_traces",
    "trace_name",
]
