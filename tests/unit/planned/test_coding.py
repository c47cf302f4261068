"""Chunks that travel in a smaller dtype: what is sent of them, and how their sums come back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_cuda import CUDA, FakeStream, fake_cuda
from fake_wire import FakeWire, Run, alone
from torch import Tensor, nn

from bytesched.observe import Observers
from bytesched.plugins.failures import Failures
from bytesched.plugins.figures.meter import Meter
from bytesched.plugins.planned.buckets import Bucket
from bytesched.plugins.planned.coding import coding_of
from bytesched.plugins.planned.cutting import cut_whole
from bytesched.plugins.planned.sending import Sending

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with fake_cuda():
        yield


class Coded:
    """A sending of one bucket, in chunks of two elements or less."""

    def __init__(self, gradient: Tensor, compression: str = "fp16", **wire: Any) -> None:
        self.wire = FakeWire(**wire)
        failures, meter = Failures(self.wire), Meter(Observers(), 1)
        coding = coding_of(compression, self.wire.size)
        self.sending = Sending(self.wire, failures, meter, Mock(order=None), coding)
        parameter, sums = nn.Parameter(torch.zeros_like(gradient)), object()
        self.bucket = Bucket(
            *(sums, gradient, [parameter], [gradient], {}),  # type: ignore[arg-type]
            holds_gradients=True,
            cut=partial(cut_whole, chunk_bytes=2 * gradient.element_size()),
            first=0,
        )

    def round(self, gradient: Tensor | None = None) -> None:
        if gradient is not None:
            self.bucket.buffer.copy_(gradient)
        self.bucket.is_under_way = True
        self.sending.round_begins()
        self.sending.ready(self.bucket.chunks, is_last=True)

    def wait(self) -> Tensor:
        self.sending.wait(self.bucket.chunks, "a gate")
        return self.bucket.buffer


def numbers(dtype: torch.dtype = torch.float32, numel: int = 6) -> Tensor:
    # So small that it shows whether they were divided before they were rounded.
    made = torch.randn(numel, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return (made * 1e-6).to(dtype)


def summed(gradient: Tensor) -> Tensor:
    return gradient.half().div_(2).mul_(2).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compression", DTYPES)
def test_gradients_are_rounded_first_and_divided_then(compression: str, dtype: torch.dtype) -> None:
    coded, on_wire = Coded(numbers(dtype), compression, size=3), DTYPES[compression]
    for step in range(3):
        gradient = numbers(dtype) * (step + 1)
        coded.round(gradient)
        mine = gradient.to(on_wire).div_(3)
        assert torch.equal(torch.cat(coded.wire.started[-3:]), mine)
        assert torch.equal(coded.wait(), mine.mul_(3).to(dtype))


def test_wire_memory_is_kept() -> None:
    coded = Coded(numbers())
    coded.round()
    coded.wait()
    coded.round(numbers())
    first, second = coded.wire.started[:3], coded.wire.started[3:]
    assert [one.data_ptr() for one in first] == [one.data_ptr() for one in second]
    # Nobody beside the bucket has its memory.
    assert not coded.bucket.is_seen


def test_what_has_the_dtype_of_the_wire_is_sent_from_the_bucket() -> None:
    coded = Coded(numbers(torch.float16))
    coded.round()
    begins = [chunk.data_ptr() for chunk in coded.wire.started]
    assert begins == [coded.bucket.address + offset for offset in (0, 4, 8)]


def test_bytes_are_those_on_the_wire() -> None:
    coded = Coded(numbers())
    coded.round()
    assert coded.sending.outstanding_bytes(coded.bucket.chunks) == 12


def test_the_bucket_has_no_sum_before_somebody_waits() -> None:
    coded = Coded(numbers())
    coded.round()
    coded.wire.let()
    assert torch.equal(coded.bucket.buffer, numbers())
    coded.sending.wait(coded.bucket.chunks[:1], "a gate")
    assert torch.equal(coded.bucket.buffer[:2], summed(numbers()[:2]))
    assert torch.equal(coded.bucket.buffer[2:], numbers()[2:])


def test_a_sum_comes_back_once() -> None:
    """What is done to it stays, wherever it is waited for again."""
    coded, other = Coded(numbers(), has_streams=True), FakeStream()
    for _ in range(2):
        coded.round(numbers())
        coded.wait().mul_(0.5)
        with CUDA.on(other):
            again = coded.wait()
        assert torch.equal(again, summed(numbers()) * 0.5)


def test_a_signal_handler_may_wait_in_between() -> None:
    coded = Coded(numbers())
    coded.round()
    wait = coded.wire.wait

    def interrupted(work: Any, task: str) -> None:
        wait(work, task)
        coded.wire.wait = wait  # type: ignore[method-assign]
        coded.wait().zero_()

    coded.wire.wait = interrupted  # type: ignore[method-assign]
    assert not coded.wait().any()


@pytest.mark.parametrize("view", [False, True], ids=["own", "view"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_are_no_turns_with_ddp_which_would_send_other_numbers(dtype: str, view: bool) -> None:
    with alone():
        run = Run(FakeWire(), compression=dtype, ddp={"gradient_as_bucket_view": view})
        run.train(3)
        assert run.session._collectives is None
        assert {chunk.sent.dtype for chunk in run.chunks} == {DTYPES[dtype]}
        run.session.flush()
        assert run.session.stats()["bytes_per_step"] == 1936 / 2
        run.close()
