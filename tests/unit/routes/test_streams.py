"""The streams of a session, in one process: over a device whose work ends late."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from fake_cuda import FakeCuda, FakeEvent, FakeStream, after, fake_cuda
from torch import nn
from torch.utils._foreach_utils import _has_foreach_support

from bytesched.errors import PluginError
from bytesched.plugins.proxies.lazy_grads import LazyGrad
from bytesched.plugins.routes.streams import CudaStreams, Streams, streams_for
from bytesched.task import CommTask


def test_the_cpu_needs_no_streams() -> None:
    assert type(streams_for(torch.device("cpu"), lambda error: None)) is Streams


def test_gradients_take_the_fast_paths_of_plain_ones() -> None:
    """Torch looks at types before it looks at values, and the paths round differently on a GPU."""
    waits: list[int] = []
    grad = torch.randn(3).as_subclass(LazyGrad)
    grad.synchronize = lambda: waits.append(1)
    grad.is_taken = lambda: False
    assert _has_foreach_support([grad], torch.device("cuda"))
    assert not waits
    parameter = nn.Parameter(torch.randn(3))
    parameter.grad = grad
    nn.utils.clip_grad_norm_([parameter], 0.1)
    assert waits
    assert type(copy.deepcopy(grad)) is torch.Tensor
    torch.save(grad, io.BytesIO())
    assert not isinstance(torch.zeros(1), LazyGrad)


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as device:
        yield device


@pytest.fixture
def errors() -> list[BaseException]:
    return []


@pytest.fixture
def streams(cuda: FakeCuda, errors: list[BaseException]) -> Iterator[CudaStreams]:
    made = CudaStreams(torch.device("cuda", 0), errors.append)
    yield made
    made.close()
    assert not errors


def task(index: int = 0) -> CommTask:
    made = CommTask(f"chunk {index}", start_at=0, stop_at=8)
    made.index = index
    return made


def wait_computed(streams: CudaStreams, chunk: CommTask) -> None:
    computed = threading.Event()
    streams.backward_done(chunk, lambda _: computed.set())
    assert computed.wait(5.0)


def test_chunk_is_sent_after_its_gradients_of_every_stream(
    cuda: FakeCuda, streams: CudaStreams
) -> None:
    side = FakeStream()
    with cuda.on(side):
        one = side.queue()
        streams.gradient()
    other = cuda.default.queue()
    streams.gradient()
    wait_computed(streams, task())
    with streams.communication(task()):
        sent = cuda.current().queue()
    assert after(sent, one)
    assert after(sent, other)


def test_completion_does_not_queue_behind_what_is_sent_next(
    cuda: FakeCuda, streams: CudaStreams
) -> None:
    with streams.communication(task(1)):
        sent_next = cuda.current().queue()
    with streams.completion(task(0)):
        received = cuda.current().queue()
    assert not after(received, sent_next)
    assert after(cuda.host, received)


def test_update_comes_after_what_was_queued_before_step(
    cuda: FakeCuda, streams: CudaStreams
) -> None:
    backward = cuda.default.queue()
    streams.stepped()
    with streams.update():
        updated = cuda.current().queue()
    assert after(updated, backward)
    assert not after(cuda.default.queue(), updated), "the user's stream waits too early"


def test_reads_on_every_known_stream_come_after_the_update(
    cuda: FakeCuda, streams: CudaStreams
) -> None:
    side, reader = FakeStream(), FakeStream()
    with cuda.on(side):
        streams.gradient()
    streams.stepped()
    with streams.update():
        updated = cuda.current().queue()
    with cuda.on(reader):
        streams.read()
    for stream in (cuda.default, side, reader):
        assert after(stream.queue(), updated)
    assert not after(cuda.host, updated), "the host has waited"


def test_capture_is_refused(cuda: FakeCuda, streams: CudaStreams) -> None:
    streams.begin()
    cuda.capturing = True
    with pytest.raises(PluginError, match="CUDA graph"):
        streams.begin()


def test_device_error_is_told_once(cuda: FakeCuda, errors: list[BaseException]) -> None:
    streams = CudaStreams(torch.device("cuda", 0), errors.append)
    broken = RuntimeError("device-side assert")
    with mock.patch.object(FakeEvent, "synchronize", side_effect=broken):
        for index in range(3):
            streams.backward_done(task(index), lambda _: None)
        streams.close()
        streams.close()
    assert errors == [broken]
