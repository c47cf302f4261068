"""Urgent sections over schedulers: what is held, what lets it go, and what is counted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from plans import planned
from scheduler_bench import WAIT_S, Bench, Build, benches

import bytesched
from bytesched.observe import Observer, Observers
from bytesched.urgency import URGENCY, Urgency

#: no hold ends by itself
NEVER = (1e6, 1e6)


class Held(Urgency):
    """Sections over benches of one test."""

    def __init__(self, build: Build) -> None:
        super().__init__(NEVER)
        self._build = build

    def bench(self, **parts: Any) -> Bench:
        bench = self._build(**parts)
        self.join(bench.scheduler)
        return bench


@pytest.fixture
def urgency() -> Iterator[Held]:
    with benches() as build:
        urgency = Held(build)
        yield urgency
        for scheduler in tuple(urgency._members):
            urgency.leave(scheduler)
        if (watch := urgency._watch) is not None:
            watch.join(WAIT_S)


def test_nothing_starts_inside_a_section_and_all_that_waited_does_after_it(urgency: Held) -> None:
    bench = urgency.bench(credit_bytes=100)
    a, b, c = planned([10] * 3)
    bench.ready(c, started=1)
    section = urgency.begin("all-to-all")
    bench.ready(b, a)
    bench.transport.finish_next()
    bench.settle()
    assert bench.transport.started == [c]
    section.end()
    section.end()
    bench.settle()
    assert bench.transport.started == [c, a, b]
    figures = urgency.figures()
    assert figures["urgent_sections"] == 1
    assert figures["held_s"] > 0
    assert figures["urgent_s"] > 0
    assert figures["urgent_released"] == 0


def test_sections_nest_overlap_and_end_on_any_thread(urgency: Held) -> None:
    bench = urgency.bench()
    (task,) = planned([10])
    first, second = urgency.begin("first"), urgency.begin("second")
    bench.ready(task)
    other = threading.Thread(target=first.end)
    other.start()
    other.join(WAIT_S)
    bench.settle()
    assert bench.transport.started == []
    second.end()
    bench.transport.wait_for(1)


def test_who_joins_inside_a_section_is_held_and_who_leaves_is_not(urgency: Held) -> None:
    with_it = urgency.bench()
    section = urgency.begin("section")
    later = urgency.bench()
    tasks = planned([10]), planned([10])
    for bench, (task,) in zip((with_it, later), tasks, strict=True):
        bench.ready(task)
        bench.settle()
        assert bench.transport.started == []
    urgency.leave(later.scheduler)
    later.transport.wait_for(1)
    with_it.settle()
    assert with_it.transport.started == []
    section.end()
    with_it.transport.wait_for(1)


def test_a_wait_inside_a_section_lets_all_go_until_it_is_over(urgency: Held) -> None:
    bench = urgency.bench(credit_bytes=100)
    first, second = planned([10] * 2)
    section = urgency.begin("section")
    bench.ready(first)
    with urgency.waiting():
        bench.transport.wait_for(1)
    bench.ready(second)
    bench.settle()
    assert bench.transport.started == [first]
    section.end()
    bench.transport.wait_for(2)


def test_a_hold_ends_at_its_limit_and_that_is_said_once(
    urgency: Held, caplog: pytest.LogCaptureFixture
) -> None:
    urgency._limits_s = (0.01, 0.01)
    bench = urgency.bench()
    with caplog.at_level(logging.WARNING, "bytesched"):
        for round_ in range(1, 3):
            (task,) = planned([10])
            section = urgency.begin("late")
            bench.ready(task, started=round_)
            section.end()
            bench.transport.finish_next()
    assert [record.message[:28] for record in caplog.records] == ["the urgent section 'late' ha"]
    assert urgency.figures()["urgent_released"] == 2


def test_without_schedulers_nothing_is_held_and_no_thread_begins() -> None:
    urgency = Urgency()
    before = threading.active_count()
    section = urgency.begin("section")
    assert not urgency.is_held
    assert threading.active_count() == before
    section.end()
    assert urgency.figures()["urgent_sections"] == 1


def test_an_exception_ends_the_section_and_goes_on() -> None:
    before = URGENCY.figures()["urgent_sections"]

    @bytesched.urgent("broken")
    def broken() -> None:
        assert repr(URGENCY).count("1 sections")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert repr(URGENCY).count("0 sections")
    assert URGENCY.figures()["urgent_sections"] == before + 1


class Recorder(Observer):
    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []

    def on_span(self, track: str, name: str, *args: Any) -> None:
        self.spans.append((track, name))


def test_observers_hear_of_a_section_until_they_leave() -> None:
    urgency, recorder = Urgency(), Recorder()
    leave = urgency.observe(Observers([recorder]))
    for name in ("all-to-all", "another"):
        urgency.begin(name).end()
        leave()
    assert recorder.spans == [("urgent", "all-to-all")]


def test_a_hold_is_in_force_when_begin_returns_while_another_thread_handles(urgency: Held) -> None:
    """Unless that takes long: here it ends while `begin` waits for it."""
    entered, may_end = threading.Event(), threading.Event()
    bench = urgency.bench(credit_bytes=100)

    def slow() -> tuple[()]:
        entered.set()
        assert may_end.wait(WAIT_S)
        return ()

    busy = threading.Thread(target=bench.scheduler._put, args=(slow,))
    busy.start()
    assert entered.wait(WAIT_S)
    section = urgency.begin("section")
    may_end.set()
    busy.join(WAIT_S)
    bench.ready(*planned([10]))
    bench.settle()
    assert bench.transport.started == []
    section.end()
    bench.transport.wait_for(1)
