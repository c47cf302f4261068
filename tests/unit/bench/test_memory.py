"""What a block of iterations is said to take."""

from __future__ import annotations

import torch

from bytesched.plugins.bench.machine import peak_bytes, reset_peak, state_bytes


def test_a_peak_is_seen_after_it_is_over() -> None:
    began = reset_peak()
    size = 64 << 20
    bytearray(size)[::4096] = b"x" * (size // 4096)
    assert peak_bytes() - began >= size // 2


def test_state_is_that_of_the_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    assert state_bytes(optimizer) == 0
    parameter.grad = torch.ones(10)
    optimizer.step()
    assert state_bytes(optimizer) == parameter.nbytes
