"""Routes of hops over several lanes: no order of events breaks a rule or stalls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plans import planned

from bytesched.core import SchedulerCore
from bytesched.errors import InvalidTransition
from bytesched.lane import Lane
from bytesched.order import Following, Leading
from bytesched.policy import Priority
from bytesched.task import CommTask

SUMS, SPREADS, ELSEWHERE = range(3)


def routes(sizes: list[int], core: SchedulerCore) -> list[CommTask]:
    """A chunk of each size, summed first and then spread on one link, or elsewhere."""
    sums = planned(sizes)
    for chunk in sums:
        hop = planned([chunk.nbytes])[0]
        hop.index = hop.priority = chunk.index
        hop.lane = SPREADS if chunk.index % 2 else ELSEWHERE
        chunk.followers = (hop,)
    return sums


def machine(credit_bytes: int, *, ordered: bool) -> SchedulerCore:
    queue = Following() if ordered else Leading(Priority())
    core = SchedulerCore(queue, credit_bytes=credit_bytes)
    spreads = core.add_lane(Lane(Leading(Priority()), credit_bytes=1, name="spreads"))
    core.yield_to(spreads, (core.lanes[SUMS],))
    core.add_lane(Lane(Leading(Priority()), credit_bytes=credit_bytes, name="elsewhere"))
    return core


class AnyEvents(RuleBasedStateMachine):
    """Routes of two hops; what is ready, finished, held and released is drawn."""

    @initialize(
        sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
        credit_bytes=st.integers(1, 60),
        ordered=st.booleans(),
    )
    def build(self, sizes: list[int], credit_bytes: int, ordered: bool) -> None:
        self.core = machine(credit_bytes, ordered=ordered)
        self.waiting = routes(sizes, self.core)
        self.all = list(self.waiting)
        self.order = [chunk.index for chunk in reversed(self.all)]
        self.is_ordered = ordered
        self.in_flight: list[CommTask] = []
        self.started: list[CommTask] = []
        self.held = 0
        if ordered:
            assert self.core.ordered(self.order) == []

    def note(self, started: list[CommTask]) -> None:
        for hop in started:
            assert not self.held, "what is held started"
            if hop.lane == SPREADS:
                assert self.core.lanes[SUMS].queue.peek() is None, "a sum was passed"
        self.in_flight += started
        self.started += started

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def become_ready(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(chunk)
        assert chunk.notify_ready()
        self.note(self.core.ready(chunk))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        hop = data.draw(st.sampled_from(self.in_flight))
        self.in_flight.remove(hop)
        self.note(self.core.finish(hop))

    @rule()
    def hold(self) -> None:
        self.held += 1
        self.core.hold()

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.held -= 1
        self.note(self.core.release())

    @rule(credit_bytes=st.integers(1, 80), lane=st.sampled_from([SUMS, SPREADS, ELSEWHERE]))
    def change_credit(self, credit_bytes: int, lane: int) -> None:
        self.note(self.core.set_credit(credit_bytes, lane))

    @invariant()
    def what_may_start_does(self) -> None:
        for lane in self.core.lanes if hasattr(self, "core") and not self.held else ():
            if lane.queue.peek() is None or lane.in_flight_bytes:
                continue
            waits = lane.name == "spreads" and self.core.lanes[SUMS].queue.peek() is not None
            assert waits, f"{lane} stalls"

    @invariant()
    def what_is_held_back_is_known(self) -> None:
        if hasattr(self, "core"):
            assert self.held or not (self.core.held_back() or self.core.is_held_back)

    @invariant()
    def holds(self) -> None:
        self.core.validate()
        sums = [hop.index for hop in self.started if hop.lane == SUMS]
        if self.is_ordered:
            assert sums == self.order[: len(sums)], "a given order was not kept"
        spread = {id(hop) for hop in self.started if hop.lane != SUMS}
        done = {id(f) for c in self.all for f in c.followers if c in self.started}
        assert spread <= done, "a hop began before the one in front of it"

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        while self.held:
            self.release()
        for chunk in tuple(self.waiting):
            self.waiting.remove(chunk)
            chunk.notify_ready()
            self.note(self.core.ready(chunk))
        while self.in_flight:
            self.note(self.core.finish(self.in_flight.pop(0)))
        assert self.core.idle
        assert len(self.started) == 2 * len(self.all)


AnyEvents.TestCase.settings = settings(max_examples=75, stateful_step_count=40)
TestAnyEvents = AnyEvents.TestCase


def test_a_lane_yields_to_what_can_start_and_to_nothing_else() -> None:
    core = machine(10, ordered=True)
    first, second = routes([5, 5], core)
    core.ordered([1, 0])
    for hop in (*first.followers, *second.followers):
        hop.lane = SPREADS
    first.notify_ready()
    assert core.ready(first) == [], "it is not its turn"
    spread = second.followers[0]
    second.notify_ready()
    assert core.ready(second) == [second, first]
    assert core.finish(second) == [spread], "no sum waits for its turn"


def test_what_is_held_back_would_start_were_nothing_held() -> None:
    core = machine(10, ordered=False)
    large, behind = routes([10, 10], core)
    for task in (large, behind):
        task.notify_ready()
    assert core.ready(large) == [large]
    core.hold()
    assert core.ready(behind) == []
    assert core.is_held_back is False, "it would have waited for credit as well"
    core.finish(large)
    assert core.is_held_back
    assert core.held_back() == [behind, *large.followers]
    assert behind in core.release()


def test_a_new_lane_is_held_as_the_others_are() -> None:
    core = machine(10, ordered=False)
    core.hold()
    number = core.add_lane(Lane(Leading(Priority()), credit_bytes=1))
    hop = CommTask("late", start_at=0, stop_at=4)
    hop.lane = number
    hop.notify_ready()
    assert core.ready(hop) == []
    assert core.release() == [hop]


def test_only_what_is_held_is_released() -> None:
    core = machine(10, ordered=False)
    with pytest.raises(InvalidTransition, match="not held"):
        core.release()


def test_open_is_a_lane_on_which_a_ready_hop_may_start() -> None:
    chunk = CommTask("c", start_at=0, stop_at=4)
    chunk.index = 0
    lane = Lane(Leading(Priority()), credit_bytes=4)
    assert lane.may_start(chunk)
    chunk.notify_ready()
    lane.queue.add(chunk)
    assert lane.start_next() == [chunk]
    assert not lane.may_start(chunk)
    lane.landed(chunk)
    assert lane.may_start(chunk)
    followed = Lane(Following(), credit_bytes=4)
    assert not followed.may_start(chunk)
    followed.queue.extend([0])
    assert followed.may_start(chunk)
