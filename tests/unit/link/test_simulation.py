"""Virtual time, and a link in it."""

from __future__ import annotations

import pytest

from bytesched.link.simulation import LinkTransport, ManualClock
from bytesched.task import CommTask


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
    a, b, c = (CommTask(f"t{index}", start_at=0, stop_at=100) for index in range(3))

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
