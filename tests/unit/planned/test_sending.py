"""Chunks on the wire: in which order they are issued, in which dtype, and who waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_cuda import CUDA, FakeStream, after, fake_cuda
from fake_wire import FakeWire, Run
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bytesched.errors import PeerLost, PluginError
from bytesched.observe import Observers
from bytesched.plugins.failures import Failures
from bytesched.plugins.figures.meter import Meter
from bytesched.plugins.planned.buckets import Bucket, Chunk
from bytesched.plugins.planned.coding import coding_of
from bytesched.plugins.planned.cutting import Cut
from bytesched.plugins.planned.sending import Sending, refuse_capture
from bytesched.plugins.planned.wire import HOST, GroupWire

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def queued() -> Iterator[None]:
    with fake_cuda():
        yield


class Planned:
    """An order, and what is told of chunks: everything."""

    measured = awaited = observers = SimpleNamespace(are_any=True)

    def __init__(self, order: Sequence[int] | None) -> None:
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
    """A sending of these gradients, each in a bucket, in chunks of so many elements."""

    def __init__(
        self,
        *gradients: Tensor,
        each: int = 1,
        order: Sequence[int] | None = None,
        compression: str = "none",
        **wire: Any,
    ) -> None:
        self.wire, self.planned, self.each = FakeWire(**wire), Planned(order), each
        planning: Any = self.planned
        coding = coding_of(compression, self.wire.size)
        meter = Meter(Observers(), 1)
        self.sending = Sending(self.wire, Failures(self.wire), meter, planning, coding)
        self.chunks: list[Chunk] = []
        self.buckets = [self._bucket(gradient) for gradient in gradients]
        self.buffer = self.buckets[0].buffer

    def _bucket(self, gradient: Tensor) -> Bucket:
        parameter, sums = nn.Parameter(torch.zeros_like(gradient)), object()
        bucket = Bucket(
            *(sums, gradient, [parameter], [gradient], {id(parameter): "p"}),  # type: ignore[arg-type]
            holds_gradients=True,
            cut=lambda *_: [Cut(end) for end in range(self.each, len(gradient) + 1, self.each)],
            first=len(self.chunks),
        )
        self.chunks += bucket.chunks
        return bucket

    def round(self) -> list[int]:
        """One round; the indices of chunks as they were issued."""
        before = len(self.wire.started)
        self.sending.round_begins()
        for number, bucket in enumerate(self.buckets, 1):
            bucket.is_under_way = True
            self.sending.ready(bucket.chunks, is_last=number == len(self.buckets))
        return self.issued(before)

    def issued(self, before: int = 0) -> list[int]:
        index_of = {id(chunk.sent): chunk.index for chunk in self.chunks}
        return [index_of[id(tensor)] for tensor in self.wire.started[before:]]

    def wait(self, *chunks: int) -> Tensor:
        """The memory of the first bucket, after a wait for these chunks, or all."""
        awaited = [self.chunks[index] for index in chunks] or self.chunks
        self.sending.wait(awaited, "a gate")
        return self.buffer


# -- order -----------------------------------------------------------------------------


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans())
def test_chunks_go_as_planned_or_ready_and_none_is_held_back_that_is_next(
    data: st.DataObject, counts: list[int], is_planned: bool
) -> None:
    indices = range(sum(counts))
    order = data.draw(st.permutations(indices)) if is_planned else list(indices)
    sent = Sent(*map(torch.ones, counts), order=order if is_planned else None)
    sent.sending.round_begins()
    ready: set[int] = set()
    for bucket in sent.buckets:
        sent.sending.ready(bucket.chunks, is_last=False)
        ready |= {chunk.index for chunk in bucket.chunks}
        issued = sent.issued()
        assert issued == order[: len(issued)]
        assert not ready & set(order[len(issued) : len(issued) + 1])
    assert sent.round() == order
    assert sent.planned.lasts == [order[-1]]


def test_a_round_that_was_left_holds_nothing_back_from_the_next() -> None:
    sent = Sent(*[torch.ones(1)] * 3, order=[2, 0, 1])
    sent.sending.round_begins()
    for bucket in sent.buckets[:2]:
        sent.sending.ready(bucket.chunks, is_last=False)
    assert sent.wire.started == []
    sent.planned.order = None
    assert sent.round() == [0, 1, 2]


# -- waits -----------------------------------------------------------------------------


def test_a_chunk_that_was_held_back_is_issued_after_it_is_ready() -> None:
    sent = Sent(torch.ones(1), torch.ones(1), order=[1, 0], has_streams=True)
    sent.sending.round_begins()
    first, second = FakeStream(), FakeStream()
    with CUDA.on(first):
        filled = first.queue()
        sent.sending.ready(sent.chunks[:1], is_last=False)
        later = first.queue()
    with CUDA.on(second):
        sent.sending.ready(sent.chunks[1:], is_last=True)
        issued = second.queue()
    assert sent.issued() == [1, 0]
    assert after(issued, filled)
    # And after nothing that has come since.
    assert not after(issued, later)


def test_process_groups_know_where_kernels_are_queued() -> None:
    group = Mock(size=2)
    host, wire = (GroupWire(group, group, (), torch.device(name)) for name in ("cpu", "cuda:0"))
    assert (host.has_streams, host.stream()) == (False, HOST)
    assert wire.has_streams
    for stream in (CUDA.default, FakeStream()):
        with CUDA.on(stream):
            assert wire.stream() == stream.cuda_stream != HOST


def test_what_is_outstanding_is_known_without_a_wait() -> None:
    sent = Sent(torch.ones(3))
    sent.round()
    outstanding_bytes = sent.sending.outstanding_bytes
    assert outstanding_bytes(sent.chunks) == 12
    sent.wire.let(but=2)
    assert outstanding_bytes(sent.chunks) == 8
    sent.wait(1)
    assert outstanding_bytes(sent.chunks) == 4
    assert outstanding_bytes(sent.chunks[:2]) == 0


def test_forgotten_chunks_keep_no_work() -> None:
    sent = Sent(torch.ones(2), order=[1, 0])
    sent.round()
    sent.sending.forget(sent.buckets)
    assert [chunk.work for chunk in sent.chunks] == [None, None]


def test_what_some_ranks_sum_has_a_wire_of_its_own() -> None:
    sent, part = Sent(torch.ones(1), torch.ones(2), torch.ones(1)), FakeWire()
    for chunk in sent.buckets[1].chunks:
        chunk.wire = part
    assert sent.round() == [0, 3]
    assert part.started == [chunk.sent for chunk in sent.buckets[1].chunks]
    part.error = PeerLost("gone")
    sent.wait(0)
    with pytest.raises(PeerLost):
        sent.wait(1)


def test_a_graph_that_is_captured_is_refused() -> None:
    refuse_capture()
    CUDA.capturing = True
    with pytest.raises(PluginError, match="a CUDA graph is being captured"):
        refuse_capture()


# -- a smaller dtype -------------------------------------------------------------------


def numbers(dtype: torch.dtype = torch.float32) -> Tensor:
    # So small that it shows whether they were divided before they were rounded.
    made = torch.randn(6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return (made * 1e-6).to(dtype)


SUMMED = numbers().half().div_(2).mul_(2).float()


def coded(dtype: torch.dtype = torch.float32, **options: Any) -> Sent:
    return Sent(numbers(dtype), each=2, **{"compression": "fp16", **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compression", DTYPES)
def test_gradients_are_rounded_first_and_divided_then(compression: str, dtype: torch.dtype) -> None:
    sent, on_wire = coded(dtype, compression=compression, size=3), DTYPES[compression]
    for step in range(3):
        gradient = numbers(dtype) * (step + 1)
        sent.buffer.copy_(gradient)
        sent.round()
        mine = gradient.to(on_wire).div_(3)
        assert torch.equal(torch.cat(sent.wire.started[-3:]), mine)
        assert torch.equal(sent.wait(), mine.mul_(3).to(dtype))


def test_wire_memory_is_kept_and_that_of_the_bucket_is_sent_where_it_has_the_dtype() -> None:
    sent = coded()
    for _ in range(2):
        sent.round()
        sent.wait()
    first, second = sent.wire.started[:3], sent.wire.started[3:]
    assert [one.data_ptr() for one in first] == [one.data_ptr() for one in second]
    # Nobody beside the bucket has its memory.
    assert not sent.buckets[0].is_seen
    sent = coded(torch.float16)
    sent.round()
    begins = [chunk.data_ptr() - sent.buckets[0].address for chunk in sent.wire.started]
    assert begins == [0, 4, 8]


def test_bytes_are_those_on_the_wire_and_the_bucket_has_no_sum_before_somebody_waits() -> None:
    sent = coded()
    sent.round()
    assert sent.sending.outstanding_bytes(sent.chunks) == 12
    sent.wire.let()
    assert torch.equal(sent.buffer, numbers())
    assert torch.equal(sent.wait(0), torch.cat([SUMMED[:2], numbers()[2:]]))


def test_a_sum_comes_back_once() -> None:
    """What is done to it stays, wherever it is waited for again."""
    sent, other = coded(has_streams=True), FakeStream()
    for _ in range(2):
        sent.buffer.copy_(numbers())
        sent.round()
        sent.wait().mul_(0.5)
        with CUDA.on(other):
            again = sent.wait()
        assert torch.equal(again, SUMMED * 0.5)


def test_a_signal_handler_may_wait_in_between() -> None:
    sent = coded()
    sent.round()
    wait = sent.wire.wait

    def interrupted(work: Any, task: str) -> None:
        wait(work, task)
        sent.wire.wait = wait  # type: ignore[method-assign]
        sent.wait().zero_()

    sent.wire.wait = interrupted  # type: ignore[method-assign]
    assert not sent.wait().any()


@pytest.mark.parametrize("view", [False, True], ids=["own", "view"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_are_no_turns_with_ddp_which_would_send_other_numbers(
    run_of: Callable[..., Run], dtype: str, view: bool
) -> None:
    run = run_of(compression=dtype, ddp={"gradient_as_bucket_view": view})
    assert run.session._collectives is None
    assert {chunk.sent.dtype for chunk in run.chunks} == {DTYPES[dtype]}
    run.session.flush()
    assert run.session.stats()["bytes_per_step"] == 1936 / 2
