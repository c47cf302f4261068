"""No sequence of events breaks the core or makes it stall."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plans import planned, ready

from bytesched.core import SchedulerCore
from bytesched.order import Leading
from bytesched.policy import Fifo, Priority
from bytesched.task import CommTask, TaskState


class AnyEvents(RuleBasedStateMachine):
    """A core that is told anything that can legally happen, in any order."""

    @initialize(
        sizes=st.lists(st.integers(1, 40), min_size=1, max_size=10),
        credit_bytes=st.integers(1, 60),
        levels=st.integers(1, 4),
        fifo=st.booleans(),
    )
    def build(self, sizes: list[int], credit_bytes: int, levels: int, fifo: bool) -> None:
        self.core = SchedulerCore(
            Leading(Fifo() if fifo else Priority()), credit_bytes=credit_bytes
        )
        self.fifo = fifo
        self.waiting = planned(sizes, priorities=[i % levels for i in range(len(sizes))])
        self.queued: list[CommTask] = []
        self.in_flight: list[CommTask] = []
        self.stopped = False
        self.held = 0

    def expect_starts(self, started: list[CommTask]) -> None:
        """The rule again, in plain words: most urgent first, while the window is not full."""
        expected = []
        room = self.core.credit_bytes - sum(task.nbytes for task in self.in_flight)
        while self.queued and room > 0 and not (self.stopped or self.held):
            urgent = min(self.queued, key=lambda task: 0 if self.fifo else task.priority)
            self.queued.remove(urgent)
            expected.append(urgent)
            room -= urgent.nbytes
        assert started == expected
        self.in_flight += started

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def become_ready(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(task)
        self.queued.append(task)
        self.expect_starts(ready(self.core, task))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.in_flight))
        self.in_flight.remove(task)
        self.expect_starts(self.core.finish(task))
        task.rearm()
        self.waiting.append(task)

    @rule()
    def hold(self) -> None:
        self.held += 1
        self.core.hold()

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.held -= 1
        self.expect_starts(self.core.release())

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.in_flight))
        self.in_flight.remove(task)
        self.stopped = True
        self.core.fail(task)
        assert task.state is TaskState.FAILED

    @invariant()
    def holds(self) -> None:
        assert self.core.in_flight_bytes == sum(task.nbytes for task in self.in_flight)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        while self.held:
            self.release()
        while self.in_flight:
            task = self.in_flight.pop(0)
            self.expect_starts(self.core.finish(task))
        assert self.core.in_flight_bytes == 0
        assert self.core.idle or self.stopped
        assert bool(self.queued) <= self.stopped


AnyEvents.TestCase.settings = settings(max_examples=75, stateful_step_count=40)
TestAnyEvents = AnyEvents.TestCase
