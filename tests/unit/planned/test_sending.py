"""Chunks on the wire: in which order they are issued, and who waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, FakeStream, fake_cuda
from fake_wire import FakeWire
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bytesched.errors import PeerLost, PluginError
from bytesched.observe import Observers
from bytesched.plugins.failures import Failures
from bytesched.plugins.figures.meter import Meter
from bytesched.plugins.planned.buckets import Bucket, Chunk
from bytesched.plugins.planned.cutting import Cut
from bytesched.plugins.planned.sending import Sending
from bytesched.plugins.planned.wire import HOST


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with fake_cuda():
        yield


class Planned:
    """An order, and what is told of chunks: everything."""

    measured = awaited = observers = SimpleNamespace(are_any=True)

    def __init__(self, order: Sequence[int] | None = None) -> None:
        self.order = order
        self.lasts: list[int] = []

    def ready(self, chunks: Sequence[Chunk]) -> None:
        pass

    def waited(self, chunk: Chunk) -> None:
        assert chunk.landed_on is not None

    def issued(self, chunk: Chunk, *, is_last: bool) -> None:
        assert chunk.work is not None
        self.lasts += [chunk.index] * is_last


class Sent:
    """A sending with buckets of so many chunks."""

    def __init__(self, *counts: int, order: Sequence[int] | None = None, has_streams: bool = False):
        self.wire, self.planned = FakeWire(has_streams), Planned(order)
        self.failures = Failures(self.wire)
        planning: Any = self.planned
        meter = Meter(Observers(), 1)
        self.sending = Sending(self.wire, self.failures, meter, planning)
        firsts = [sum(counts[:number]) for number in range(len(counts))]
        self.buckets = [_bucket(*one) for one in zip(firsts, counts, strict=True)]
        self.chunks = [chunk for bucket in self.buckets for chunk in bucket.chunks]

    def round(self) -> list[int]:
        """One round; the indices of chunks as they were issued."""
        before = len(self.wire.started)
        self.sending.round_begins()
        for number, bucket in enumerate(self.buckets, 1):
            bucket.is_under_way = True
            self.sending.ready(bucket.chunks, is_last=number == len(self.buckets))
        return [self.index_of(tensor) for tensor in self.wire.started[before:]]

    def index_of(self, tensor: torch.Tensor) -> int:
        return next(chunk.index for chunk in self.chunks if chunk.sent is tensor)


def _bucket(first: int, count: int) -> Bucket:
    parameter = nn.Parameter(torch.zeros(count))
    buffer, sums = torch.ones(count), object()
    return Bucket(
        *(sums, buffer, [parameter], [buffer], {id(parameter): f"p{first}"}),  # type: ignore[arg-type]
        holds_gradients=True,
        cut=lambda _, __, buffer: [Cut(end) for end in range(1, buffer.numel() + 1)],
        first=first,
    )


counts = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(counts)
def test_without_a_plan_chunks_go_as_they_become_ready(counts: list[int]) -> None:
    sent = Sent(*counts)
    for _ in range(2):
        assert sent.round() == list(range(sum(counts)))
    assert sent.planned.lasts == [sum(counts) - 1] * 2


@given(st.data(), counts)
def test_a_plan_is_the_order_of_every_round(data: st.DataObject, counts: list[int]) -> None:
    order = data.draw(st.permutations(range(sum(counts))))
    sent = Sent(*counts, order=order)
    for _ in range(2):
        assert sent.round() == order
    assert sent.planned.lasts == [order[-1]] * 2


@given(st.data(), counts)
def test_nothing_that_is_next_and_ready_is_held_back(
    data: st.DataObject, counts: list[int]
) -> None:
    order = data.draw(st.permutations(range(sum(counts))))
    sent = Sent(*counts, order=order)
    sent.sending.round_begins()
    ready: set[int] = set()
    for bucket in sent.buckets:
        sent.sending.ready(bucket.chunks, is_last=False)
        ready |= {chunk.index for chunk in bucket.chunks}
        issued = [sent.index_of(tensor) for tensor in sent.wire.started]
        assert issued == order[: len(issued)]
        assert order[len(issued) : len(issued) + 1] not in [[index] for index in ready]


def test_a_round_that_was_left_holds_nothing_back_from_the_next() -> None:
    sent = Sent(1, 1, 1, order=[2, 0, 1])
    sent.sending.round_begins()
    for bucket in sent.buckets[:2]:
        sent.sending.ready(bucket.chunks, is_last=False)
    assert sent.wire.started == []
    sent.planned.order = None
    assert sent.round() == [0, 1, 2]


def test_a_chunk_is_waited_for_once_on_the_host() -> None:
    sent = Sent(2)
    sent.round()
    first, second = sent.chunks
    sent.sending.wait([first], "a gate")
    assert (first.landed_on, first.work, second.landed_on) == (HOST, None, None)
    assert sent.buckets[0].buffer.tolist() == [2.0, 1.0]
    sent.wire.error = AssertionError("it is here")
    sent.sending.wait([first], "a gate")


def test_a_signal_handler_that_waits_in_between_takes_nothing_away() -> None:
    sent = Sent(3)
    sent.round()
    wait = sent.wire.wait

    def interrupted(work: Any, task: str) -> None:
        sent.wire.wait = wait  # type: ignore[method-assign]
        sent.sending.wait(sent.chunks, "a handler")
        wait(work, task)

    sent.wire.wait = interrupted  # type: ignore[method-assign]
    sent.sending.wait(sent.chunks, "a gate")
    assert sent.buckets[0].buffer.tolist() == [2.0] * 3


def test_and_once_on_each_stream() -> None:
    sent = Sent(1, has_streams=True)
    sent.round()
    [chunk] = sent.chunks
    for stream in (CUDA.default, FakeStream(), CUDA.default):
        with CUDA.on(stream):
            sent.sending.wait([chunk], "a gate")
            assert chunk.landed_on == stream.cuda_stream
            assert chunk.work is not None
    sent.wire.error = AssertionError("it is here")
    sent.sending.wait([chunk], "a gate")


def test_a_landed_bucket_is_handed_back_with_its_sum() -> None:
    sent = Sent(2, 1)
    sent.round()
    one, two = sent.buckets
    sent.sending.land(one, "backward")
    assert (one.is_under_way, two.is_under_way) == (False, True)
    assert (one.buffer.tolist(), two.buffer.tolist()) == ([2.0, 2.0], [1.0])
    sent.sending.land_all("backward")
    assert two.buffer.tolist() == [2.0]
    sent.sending.land_all("backward")


def test_what_is_outstanding_is_known_without_a_wait() -> None:
    sent = Sent(3)
    sent.round()
    outstanding_bytes = sent.sending.outstanding_bytes
    assert outstanding_bytes(sent.chunks) == 12
    sent.wire.let(but=2)
    assert outstanding_bytes(sent.chunks) == 8
    sent.sending.wait(sent.chunks[1:2], "a gate")
    assert outstanding_bytes(sent.chunks) == 4
    assert outstanding_bytes(sent.chunks[:2]) == 0


def test_what_goes_wrong_on_the_wire_ends_the_session() -> None:
    sent = Sent(1)
    sent.round()
    sent.wire.error = error = PeerLost("rank 1 is gone", peers=[1], task="p0")
    with pytest.raises(PeerLost, match="rank 1 is gone") as raised:
        sent.sending.wait(sent.chunks, "a gate")
    assert raised.value is sent.failures.error is error
    assert sent.failures.is_error_seen
    assert sent.wire.is_aborted
    # What comes of it is not told in its place.
    sent.wire.error = PeerLost("rank 2 is gone")
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        sent.sending.wait(sent.chunks, "a gate")


def test_forgotten_chunks_keep_no_work() -> None:
    sent = Sent(2, order=[1, 0])
    sent.round()
    sent.sending.forget(sent.buckets)
    assert [chunk.work for chunk in sent.chunks] == [None, None]


def test_a_chunk_that_no_plan_has_is_named_by_whoever_waits() -> None:
    sent = Sent(2, order=[0])
    sent.round()
    with pytest.raises(PluginError, match=r"'p0 2/2' was not sent"):
        sent.sending.land_all("backward")


def test_what_some_ranks_sum_has_a_wire_of_its_own() -> None:
    sent = Sent(1, 2, 1)
    part = FakeWire()
    for chunk in sent.buckets[1].chunks:
        chunk.wire = part
    assert sent.round() == [0, 3]
    assert part.started == [chunk.sent for chunk in sent.buckets[1].chunks]
    part.error = PeerLost("gone")
    sent.sending.wait(sent.buckets[0].chunks, "0")
    with pytest.raises(PeerLost):
        sent.sending.wait(sent.buckets[1].chunks, "1")
