"""Chunks through a group: each is packed, summed, and reported in the order of sending."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from connected import two_connected
from fake_gloo import CLOSED, TIMEOUT_S, Ends, FakeGloo, fake_group
from laid_out import parameters, plan_of
from together import together

from bytesched.errors import PeerLost, SchedulerClosed
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.routes.groups.group import Group
from bytesched.plugins.routes.groups.group_transport import C10dTransport
from bytesched.plugins.routes.streams import Streams
from bytesched.task import CommTask


def planned(divisor: int = 1) -> tuple[Plan, Packer]:
    """Three parameters in several chunks, with gradients of 1, 2 and 3."""
    plan = plan_of(parameters((16,), (16,), (16,)))
    plan.cut(64)
    for number, slot in enumerate(plan.slots, 1):
        slot.parameter.grad = torch.full((16,), float(number))
        assert slot.take_gradient()
    return plan, Packer(plan, divisor, "none")


class Seen(Streams):
    """Remembers what is done where, and on which threads."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.threads: set[str] = set()

    def communication(self, task: CommTask) -> AbstractContextManager[None]:
        return self._at(f"send {task.name}")

    def completion(self, task: CommTask) -> AbstractContextManager[None]:
        self.threads.add(threading.current_thread().name)
        return self._at(f"await {task.name}")

    @contextmanager
    def _at(self, what: str) -> Iterator[None]:
        self.log.append(what)
        yield
        self.log.append(f"{what} over")


def transport_over(
    gloo: FakeGloo, streams: Streams | None = None
) -> tuple[C10dTransport, Group, Plan]:
    plan, packer = planned()
    group = fake_group(gloo)
    return C10dTransport(group, packer, streams or Streams()), group, plan


def has_gradient(plan: Plan, chunk: CommTask) -> bool:
    return any(slice_.grad is not None for slice_ in plan.slices[chunk.index])


def test_every_rank_has_the_mean() -> None:
    groups = two_connected()

    def on(rank: int) -> list[float]:
        plan, packer = planned(divisor=2)
        if rank:
            for slot in plan.slots:
                assert slot.parameter.grad is not None
                slot.parameter.grad *= 3
        transport, ends = C10dTransport(groups[rank], packer, Streams()), Ends()
        for chunk in plan.chunks:
            transport.start(chunk, ends.done)
        ends.wait(*(chunk.name for chunk in plan.chunks))
        assert ends.names == [chunk.name for chunk in plan.chunks]
        assert not ends.errors
        transport.close()
        return [float(slot.view[0]) for slot in plan.slots]

    assert together(on) == [[2.0, 4.0, 6.0]] * 2
    for group in groups:
        group.close()


def test_ends_are_reported_in_the_order_of_sending() -> None:
    gloo, ends = FakeGloo(), Ends()
    transport, _, plan = transport_over(gloo)
    for chunk in plan.chunks:
        transport.start(chunk, ends.done)
    for work in reversed(gloo.works()):
        assert not ends.names
        work.end()
    ends.wait(*(chunk.name for chunk in plan.chunks))
    assert ends.names == [chunk.name for chunk in plan.chunks]
    transport.close()


def test_gradients_live_until_their_chunk_is_complete() -> None:
    gloo, ends = FakeGloo(), Ends()
    transport, _, plan = transport_over(gloo)
    first, second, *_ = plan.chunks
    for chunk in (first, second):
        transport.start(chunk, ends.done)
    gloo.works()[0].end()
    ends.wait(first.name)
    assert gloo.works()[1].waited_for.wait(TIMEOUT_S)
    assert not has_gradient(plan, first)
    assert has_gradient(plan, second)
    gloo.works()[1].end()
    ends.wait(second.name)
    transport.close()


def test_packing_and_waiting_have_streams_of_their_own() -> None:
    gloo, ends, streams = FakeGloo(), Ends(), Seen()
    transport, _, plan = transport_over(gloo, streams)
    name = plan.chunks[0].name
    transport.start(plan.chunks[0], ends.done)
    assert streams.log[:2] == [f"send {name}", f"send {name} over"]
    gloo.works()[0].end()
    ends.wait(name)
    assert streams.log[2:] == [f"await {name}", f"await {name} over"]
    assert streams.threads == {"bytesched-waiter"}
    transport.close()


def test_a_sum_that_cannot_begin_is_an_error_of_ours() -> None:
    gloo = FakeGloo()
    transport, _, plan = transport_over(gloo)
    gloo.gone.add(1)
    with pytest.raises(PeerLost) as raised:
        transport.start(plan.chunks[0], Ends().done)
    assert raised.value.task == plan.chunks[0].name
    transport.close()


def test_a_sum_that_fails_is_reported_and_the_next_one_is_waited_for() -> None:
    gloo, ends = FakeGloo(), Ends()
    transport, _, plan = transport_over(gloo)
    first, second, *_ = plan.chunks
    for chunk in (first, second):
        transport.start(chunk, ends.done)
    gloo.works()[0].end(CLOSED)
    gloo.works()[1].end()
    ends.wait(first.name, second.name)
    assert list(ends.errors) == [first.name]
    error = ends.errors[first.name]
    assert isinstance(error, PeerLost)
    assert error.task == first.name
    transport.close()


def test_closed_it_breaks_what_is_under_way() -> None:
    gloo, ends = FakeGloo(), Ends()
    transport, group, plan = transport_over(gloo)
    first, second, *_ = plan.chunks
    for chunk in (first, second):
        transport.start(chunk, ends.done)
    transport.close()
    transport.close()
    ends.wait(first.name, second.name)
    assert group.is_aborted
    assert {type(error) for error in ends.errors.values()} == {SchedulerClosed}
    assert "bytesched-waiter" not in {thread.name for thread in threading.enumerate()}


def test_closed_with_nothing_under_way_it_leaves_connections_whole() -> None:
    gloo, ends = FakeGloo(), Ends()
    transport, group, plan = transport_over(gloo)
    transport.start(plan.chunks[0], ends.done)
    gloo.works()[0].end()
    ends.wait(plan.chunks[0].name)
    transport.close()
    assert not group.is_aborted


def test_the_end_of_a_chunk_may_close_it() -> None:
    """The collector of garbage may do so, on any thread."""
    gloo, ends = FakeGloo(), Ends()
    transport, _, plan = transport_over(gloo)

    def done(task: CommTask, error: Any) -> None:
        transport.close()
        ends.done(task, error)

    transport.start(plan.chunks[0], done)
    gloo.works()[0].end()
    ends.wait(plan.chunks[0].name)
