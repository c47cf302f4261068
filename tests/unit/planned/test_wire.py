"""Process groups as a wire."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_cuda import CUDA, FakeStream, fake_cuda

from bytesched.plugins.planned.wire import HOST, GroupWire


def group() -> Any:
    return Mock(rank=1, size=4, timeout_s=7.0, note=lambda: "; rank 2 stopped")


def wire_on(device: str) -> GroupWire:
    return GroupWire(group(), group(), (), torch.device(device))


@pytest.mark.parametrize("end", ["abort", "close"])
def test_each_group_ends_once(end: str) -> None:
    """On Gloo one group is both."""
    data, buffers = group(), group()
    getattr(GroupWire(data, data, [buffers], torch.device("cpu")), end)()
    for one in (data, buffers):
        getattr(one, end).assert_called_once_with()


def test_where_kernels_are_queued() -> None:
    with fake_cuda():
        wire = wire_on("cpu")
        assert (wire.has_streams, wire.stream()) == (False, HOST)
        wire = wire_on("cuda:0")
        assert wire.has_streams
        assert wire.stream() == CUDA.default.cuda_stream != HOST
        with CUDA.on(FakeStream()):
            assert wire.stream() == CUDA.current().cuda_stream != CUDA.default.cuda_stream
