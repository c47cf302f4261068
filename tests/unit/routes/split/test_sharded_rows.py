"""What owners stage for rows, on whatever stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from fake_cuda import CUDA, Clock, FakeStream, after, fake_cuda
from laid_out import parameters, plan_of

from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Ownership
from bytesched.plugins.routes.split.rows import RowMemory, rows_of
from bytesched.plugins.routes.split.sharded_rows import RowParameters
from bytesched.plugins.routes.streams import CudaStreams


class Filled(RowMemory):
    """Notes where the work that fills new memory stands."""

    def __init__(self) -> None:
        super().__init__()
        self.filled: list[Clock] = []

    def take(self, like: torch.Tensor, length: int, parts: int = 1) -> torch.Tensor:
        self.filled.append(CUDA.current().queue())
        return super().take(like, length, parts)


def _unused(*_: Any) -> None:
    raise AssertionError


def test_whoever_stages_waits_until_new_memory_is_filled() -> None:
    plan = plan_of(parameters((8,), (6,)))
    plan.cut(1 << 20, Ownership(2, owners=[0, 0]))
    (chunk,) = plan.chunks
    memory = Filled()
    exchange: Any = SimpleNamespace(
        rows=rows_of(plan, Packer(plan, 2, "none"), 2), memory=memory, free_index=2
    )
    with fake_cuda():
        streams = CudaStreams(torch.device("cuda", 0), _unused)
        staged = RowParameters(exchange, plan, streams, spread=_unused, gathered=_unused)
        first, then = FakeStream(), FakeStream()
        with CUDA.on(first):
            whole = staged.stage(chunk, 1)
        with CUDA.on(then):
            assert staged.stage(chunk, 1).data_ptr() == whole.data_ptr()
            (filled,) = memory.filled
            assert after(then.queue(), filled)
        streams.close()
