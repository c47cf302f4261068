"""The doubles of bytesched.testing: transports, planned faults, virtual time."""

from __future__ import annotations

import threading

import pytest
from plans import planned

from bytesched.core import SchedulerCore
from bytesched.errors import SchedulerClosed, TransportError
from bytesched.link.simulation import LinkTransport, ManualClock
from bytesched.order import Leading
from bytesched.policy import Priority
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask
from bytesched.testing import FakeTransport, FaultPlan
from bytesched.transport import Done


def sending(count: int = 4, nbytes: int = 100) -> list[CommTask]:
    """Planned tasks that a core has just started."""
    tasks = []
    for index in range(count):
        tasks.append(CommTask(f"t{index}", start_at=0, stop_at=nbytes))
        tasks[-1].index = index
        tasks[-1].notify_ready()
        tasks[-1].start()
    return tasks


class Ends:
    """Remembers every call of done."""

    def __init__(self) -> None:
        self.all: list[tuple[CommTask, BaseException | None]] = []

    def __call__(self, task: CommTask, error: BaseException | None) -> None:
        self.all.append((task, error))


def test_fake_transport_finishes_only_when_told() -> None:
    transport, ends, (a, b, c, d) = FakeTransport(), Ends(), sending()
    for task in (a, b, c, d):
        transport.start(task, ends)
    assert transport.started == [a, b, c, d]
    assert ends.all == []
    transport.finish(c)
    assert transport.finish_next() is a
    error = TransportError("cut")
    transport.fail(d, error)
    assert transport.in_flight == (b,)
    assert ends.all == [(c, None), (a, None), (d, error)]
    with pytest.raises(ValueError, match="not in flight"):
        transport.finish(c)
    transport.finish_all()
    with pytest.raises(ValueError, match="nothing is in flight"):
        transport.finish_next()
    with pytest.raises(TimeoutError, match="4 of 5"):
        transport.wait_for(5, timeout_s=0)


def test_fake_transport_refuses_a_task_that_is_in_flight() -> None:
    transport, (task,) = FakeTransport(), sending(1)
    transport.start(task, Ends())
    with pytest.raises(ValueError, match="in flight already"):
        transport.start(task, Ends())


def test_a_planned_failure_happens_in_its_step_only() -> None:
    inner, ends, (a, b) = FakeTransport(), Ends(), sending(2)
    faults = FaultPlan().fail_at(task=1, step=2)
    transport = faults.wrap(inner)
    for step in range(4):
        for task in (a, b):
            transport.start(task, ends)
            inner.finish_all()
        assert faults.count == (step >= 2)
    failed = [(place, task) for place, (task, error) in enumerate(ends.all) if error is not None]
    assert failed == [(5, b)]
    assert isinstance(ends.all[5][1], TransportError)
    assert "task 1 in step 2" in str(ends.all[5][1])


def test_a_planned_refusal_raises_in_start() -> None:
    inner, ends, (task,) = FakeTransport(), Ends(), sending(1)
    error = ConnectionResetError("cut")
    transport = FaultPlan().fail_at(task=0, step=0, error=error, at_start=True).wrap(inner)
    with pytest.raises(ConnectionResetError):
        transport.start(task, ends)
    assert inner.started == []
    transport.start(task, ends)
    inner.finish_all()
    assert ends.all == [(task, None)]


def test_a_planned_delay_lasts_until_release() -> None:
    inner, ends, (a, b) = FakeTransport(), Ends(), sending(2)
    faults = FaultPlan().delay_at(task=0, step=0)
    transport = faults.wrap(inner)
    for task in (a, b):
        transport.start(task, ends)
    inner.finish_all()
    assert ends.all == [(b, None)]
    assert faults.count == 1
    faults.release()
    assert ends.all == [(b, None), (a, None)]
    faults.release()
    assert len(ends.all) == 2


def test_close_ends_what_was_delayed() -> None:
    inner, ends, (task,) = FakeTransport(), Ends(), sending(1)
    transport = FaultPlan().delay_at(task=0, step=0).wrap(inner)
    transport.start(task, ends)
    transport.close()
    ((ended, error),) = ends.all
    assert ended is task
    assert isinstance(error, SchedulerClosed)


def test_a_send_has_one_fault() -> None:
    with pytest.raises(ValueError, match="already"):
        FaultPlan().fail_at(task=1, step=2).delay_at(task=1, step=2)


class Immediate(FakeTransport):
    """Finishes every task while it is started."""

    def start(self, task: CommTask, done: Done) -> None:
        super().start(task, done)
        self.finish(task)


@pytest.mark.parametrize("at_start", [False, True])
def test_a_planned_failure_reaches_the_scheduler(at_start: bool) -> None:
    told = threading.Event()
    error = TransportError("planned")
    faults = FaultPlan().fail_at(task=2, step=0, error=error, at_start=at_start)
    core = SchedulerCore(Leading(Priority()), credit_bytes=1)
    scheduler = Scheduler(core, faults.wrap(Immediate()), on_error=lambda _: told.set())
    for task in planned([10] * 4):
        task.notify_ready()
        scheduler.notify_ready(task)
    try:
        assert told.wait(10)
    finally:
        scheduler.close()
    assert scheduler.error is error
    assert faults.count == 1


def test_the_clock_calls_what_is_due_in_order() -> None:
    clock, called = ManualClock(), list[tuple[float, str]]()
    for at_s, name in ((3.0, "c"), (1.0, "a"), (2.0, "b"), (2.0, "B")):
        clock.call_at(at_s, lambda name=name: called.append((clock.now_s, name)))  # type: ignore[misc]
    clock.advance(2.5)
    assert called == [(1.0, "a"), (2.0, "b"), (2.0, "B")]
    assert clock.now_s == 2.5
    clock.run()
    assert called[3:] == [(3.0, "c")]
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)


def test_what_a_callback_plans_is_called_too_and_nothing_in_the_past() -> None:
    clock, called = ManualClock(), list[float]()
    clock.call_at(1.0, lambda: clock.call_at(0.5, lambda: called.append(clock.now_s)))
    clock.advance(1.0)
    assert called == [1.0]


def test_the_link_serves_one_task_after_the_other() -> None:
    clock, arrived = ManualClock(), list[tuple[float, str]]()
    link = LinkTransport(clock, bytes_per_s=100.0, overhead_s=0.5)
    a, b, c = sending(3, nbytes=100)

    def done(task: CommTask, error: BaseException | None) -> None:
        arrived.append((clock.now_s, task.name))

    link.start(a, done)
    link.start(b, done)
    clock.advance(10.0)
    link.start(c, done)
    clock.run()
    assert arrived == [(1.5, "t0"), (3.0, "t1"), (11.5, "t2")]


@pytest.mark.parametrize(("bytes_per_s", "overhead_s"), [(0, 0), (-1, 0), (1, -1)])
def test_an_impossible_link_is_refused(bytes_per_s: float, overhead_s: float) -> None:
    with pytest.raises(ValueError, match="no such link"):
        LinkTransport(ManualClock(), bytes_per_s=bytes_per_s, overhead_s=overhead_s)
