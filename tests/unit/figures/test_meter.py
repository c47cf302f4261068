"""What a session says about itself."""

from __future__ import annotations

import logging
from time import perf_counter_ns

import pytest

from bytesched.busy import Busy
from bytesched.observe import Observers
from bytesched.plugins.figures.meter import Meter
from bytesched.tunable import Setting

MS = 1_000_000


def meter(busy_ns: list[int] | None = None) -> Meter:
    """That of a model with 1000 bytes of gradients."""
    made = Meter(Observers(), 1, (lambda: 0) if busy_ns is None else (lambda: busy_ns[0]))
    made.active(1000, 10, Setting(100, 200))
    return made


def train(meter: Meter, count: int, *crossing_bytes: int) -> Meter:
    """So many rounds, each with a step for each of the numbers of bytes."""
    for _ in range(count):
        meter.round_begins()
        for nbytes in crossing_bytes:
            meter.stepped(nbytes)
    return meter


@pytest.mark.parametrize(("crossing_bytes", "said"), [(0, 1), (10, 1), (500, 0)])
def test_nothing_to_gain_is_said_once(
    crossing_bytes: int, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="bytesched"):
        train(meter(), 200, crossing_bytes)
    assert sum("were still in flight at step()" in message for message in caplog.messages) == said


def test_the_share_that_crossed_is_of_rounds_not_of_steps() -> None:
    figures = train(meter(), 4, 250, 250).figures()
    assert figures["barrier_crossed_pct"] == 50.0
    assert figures["iterations"] == 4
    assert figures["steps"] == figures["barrier_crossed_steps"] == 8


def test_rounds_that_went_another_way_do_not_count() -> None:
    busy_ns = [50 * MS]
    ours = meter(busy_ns)
    ours.stepped(0)
    train(ours, 2, 0)
    ours.causes.read("weight", waited_ns=10)
    ours.waited("weight.grad", perf_counter_ns())
    ours.begin_anew()
    ours.round_begins()
    busy_ns[0] += 8 * MS
    ours.stepped(1000)
    train(ours, 1, 300)
    figures = ours.figures()
    assert figures["barrier_crossed_pct"] == 65.0
    assert figures["comm_ms"] == 4.0
    assert figures["exposed_comm_ms"] == 0.0
    assert figures["overlap_pct"] == 100.0
    assert figures["steps"] == 5
    assert not ours.causes.worst


def test_what_arrives_before_step_is_called_hidden_only_if_it_is() -> None:
    busy_ns = [0]
    ours = train(meter(busy_ns), 1, 0)
    busy_ns[0] = 10 * MS
    assert "is hidden behind backward" in str(ours.figures()["reason"])
    ours.waited("fc", perf_counter_ns() - 20 * MS)
    assert ours.figures()["reason"] == "the rest had arrived before step()"


def test_who_waits_for_next_to_nothing_is_not_blamed() -> None:
    busy_ns = [0]
    ours = train(meter(busy_ns), 1, 0)
    busy_ns[0] = 100 * MS
    for waited_ms, reason in ((3, "is hidden behind backward"), (4, "reads all gradients")):
        ours.waited("weight", ours.moment() - waited_ms * MS)
        ours.causes.read("weight", waited_ms * MS)
        assert reason in str(ours.figures()["reason"])


def test_time_under_way_is_counted_once() -> None:
    busy = Busy()
    busy.begins(100)
    busy.begins(200)
    busy.ends(300)
    busy.ends(400)
    busy.begins(1000)
    busy.ends(1100)
    assert busy.total_ns == 400
    busy.begins(perf_counter_ns() - MS)
    assert busy.total_ns >= 400 + MS
