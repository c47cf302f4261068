"""Shares of an epoch, from traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.report.shares import KINDS, shares_of
from bytesched.trace.reading import Span, Trace
from bytesched.trace.timeline import Timeline

MS = 1_000_000


def trace_of(*spans: tuple[str, str, float, float], steps: tuple[float, ...] = (0, 100)) -> Trace:
    trace = Trace(3, steps=list(enumerate(steps)))
    for track, name, start_ms, end_ms in spans:
        trace.spans.setdefault(track, []).append(Span(start_ms, end_ms, name, {}))
    return trace


def test_what_is_waited_for_counts_once() -> None:
    shares = shares_of(
        trace_of(
            ("graph", "transformation", 0, 30),
            # Inside of the transformation, a weight was waited for.
            ("wait", "layer", 10, 20),
            ("graph", "halo", 30, 35),
            ("graph", "aggregation", 35, 75),
            ("urgent", "halo", 30, 60),
            ("urgent", "halo backward", 50, 70),
            ("urgent", "buffers", 0, 100),
            # Of another epoch, half of which is in the trace.
            ("graph", "halo", -20, 5),
        )
    )
    expected = {"aggregation": 0.4, "transformation": 0.15, "halo": 0.1, "weights": 0.1}
    assert shares == pytest.approx({**expected, "other": 0.25, "on its way": 0.4})


TIMES = st.floats(-50, 250)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["graph", "wait", "urgent"]),
            st.sampled_from(["halo", "aggregation", "transformation", "x"]),
            TIMES,
            TIMES,
        )
    )
)
def test_shares_sum_to_one(spans: list[tuple[str, str, float, float]]) -> None:
    ordered = [(track, name, min(a, b), max(a, b)) for track, name, a, b in spans]
    shares = shares_of(trace_of(("graph", "halo", 1, 2), *ordered, steps=(0, 70, 200)))
    del shares["on its way"]
    assert list(shares) == list(KINDS)
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= -1e-9


def write(folder: Path, track: str = "graph") -> Path:
    timeline = Timeline(folder)
    for step in range(3):
        at_ns = 10**9 + step * 100 * MS
        for name, start_ms, end_ms in (("aggregation", 0, 50), ("halo", 50, 60)):
            timeline.on_span(track, name, at_ns + start_ms * MS, at_ns + end_ms * MS)
        timeline.on_step(step, at_ns + 100 * MS)
    timeline.close()
    return timeline.path


def test_the_command_prints_shares(tmp_path: Path, said: Callable[..., str]) -> None:
    title, titles, row = said("report", write(tmp_path)).split("\n\n")[1].splitlines()
    assert title == "what an epoch goes to"
    assert titles.split()[:2] == ["rank", "aggregation"]
    assert row.split() == ["0", "50.0%", "0.0%", "10.0%", "0.0%", "40.0%", "0.0%"]
    with pytest.raises(ValueError, match="holds no whole epoch"):
        shares_of(trace_of(("graph", "halo", 0, 1), steps=(0,)))


def test_a_trace_without_a_graph_has_none(tmp_path: Path, said: Callable[..., str]) -> None:
    assert "epoch" not in said("report", write(tmp_path, track="forward"))
