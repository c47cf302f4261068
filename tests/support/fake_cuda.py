"""A device that computes nothing, but knows what comes after what: streams as vector clocks.

Work queued on a stream comes after all work before it there, after what the stream was made to
wait for, and after what the host has waited for, on any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

Clock = Counter[str]
# Work ends so much later than it is queued.
WORK_S = 0.001


class FakeStream:
    made = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        FakeStream.made += 1
        self.name = f"stream {FakeStream.made}"
        self.cuda_stream = FakeStream.made
        self.clock: Clock = Counter()

    def queue(self) -> Clock:
        """One more piece of work; returns its place: what it comes after, and itself."""
        self.clock |= CUDA.host
        self.clock[self.name] += 1
        return Counter(self.clock)

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.clock |= event.clock

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())


class FakeEvent:
    def __init__(self, blocking: bool = False, enable_timing: bool = False) -> None:
        self.clock: Clock = Counter()
        self.name = ""

    def record(self, stream: FakeStream) -> None:
        self.name, self.clock = stream.name, Counter(stream.clock)

    def elapsed_time(self, later: FakeEvent) -> float:
        """Milliseconds of work between both, on one stream."""
        return 1e3 * WORK_S * (later.clock[later.name] - self.clock[self.name])

    def synchronize(self) -> None:
        time.sleep(WORK_S)
        CUDA.host |= self.clock


class FakeCuda:
    """What CudaStreams uses of `torch.cuda`."""

    def __init__(self) -> None:
        self.host: Clock = Counter()
        self.default = FakeStream()
        self.capturing = False
        self._local = threading.local()

    def current(self, device: Any = None) -> FakeStream:
        stream = getattr(self._local, "stream", self.default)
        assert isinstance(stream, FakeStream)
        return stream

    def current_handle(self, index: int) -> int:
        return self.current().cuda_stream

    def is_capturing(self) -> bool:
        return self.capturing

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self._local.stream = self.current(), stream
        try:
            yield
        finally:
            self._local.stream = before


CUDA = FakeCuda()


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """`torch.cuda` in front of a fresh device."""
    CUDA.__init__()  # type: ignore[misc]
    with (
        mock.patch("torch.cuda.Stream", FakeStream),
        mock.patch("torch.cuda.Event", FakeEvent),
        mock.patch("torch.cuda.current_stream", CUDA.current),
        mock.patch("torch.cuda.default_stream", return_value=CUDA.default),
        mock.patch("torch.cuda.stream", CUDA.on),
        mock.patch("torch.cuda.device", contextlib.nullcontext),
        mock.patch("torch.cuda.is_current_stream_capturing", CUDA.is_capturing),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", CUDA.current_handle, create=True),
    ):
        yield CUDA


def after(place: Clock, other: Clock) -> bool:
    """Whether the work at `place` comes after the work at `other`."""
    return place >= other
