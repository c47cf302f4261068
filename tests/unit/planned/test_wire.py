"""Process groups as a wire."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, FakeStream, fake_cuda

from bytesched.plugins.planned.wire import HOST, GroupWire

CPU, CUDA_0 = torch.device("cpu"), torch.device("cuda", 0)


class FakeGroup:
    """Writes down what is called."""

    def __init__(self, kind: str = "gloo") -> None:
        self.backend = SimpleNamespace(name=lambda: kind)
        self.rank, self.size, self.timeout_s = 1, 4, 7.0
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args, *kwargs.values()))
            return self.calls[-1]

        return call

    def note(self) -> str:
        return "; rank 2 stopped"


def wire_of(*groups: Any, device: torch.device = CPU) -> GroupWire:
    data, control, *others = groups
    return GroupWire(data, control, others, device)


def test_sums_and_numbers_of_the_host_have_their_groups() -> None:
    data, control = FakeGroup("nccl"), FakeGroup()
    wire = wire_of(data, control)
    assert (wire.rank, wire.size, wire.timeout_s) == (1, 4, 7.0)
    gradient, numbers = torch.ones(2), torch.ones(3)
    assert wire.start(gradient) == ("all_reduce", gradient)
    assert wire.start_largest(numbers) == ("largest", numbers)
    wire.wait("a work", "0.weight")
    wire.leave_note("why")
    assert data.calls[1:] == [("wait", "a work", "0.weight"), ("leave_note", "why")]
    assert len(control.calls) == 1


@pytest.mark.parametrize("end", ["abort", "close"])
def test_each_group_ends_once(end: str) -> None:
    """On Gloo one group is both."""
    data, buffers = FakeGroup(), FakeGroup()
    getattr(wire_of(data, data, buffers), end)()
    assert data.calls == buffers.calls == [(end,)]


def test_where_kernels_are_queued() -> None:
    with fake_cuda():
        wire = wire_of(FakeGroup(), FakeGroup())
        assert (wire.has_streams, wire.stream()) == (False, HOST)
        wire = wire_of(FakeGroup("nccl"), FakeGroup(), device=CUDA_0)
        assert wire.has_streams
        assert wire.stream() == CUDA.default.cuda_stream != HOST
        with CUDA.on(FakeStream()):
            assert wire.stream() == CUDA.current().cuda_stream != CUDA.default.cuda_stream
