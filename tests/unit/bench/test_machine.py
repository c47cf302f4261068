"""What the kernel tells: memory that training takes, and the share of the cores that others had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bytesched.plugins.bench.block import (
    core_times,
    peak_bytes,
    reset_peak,
    state_bytes,
    stolen_share,
)


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


def test_the_share_is_of_the_time_in_which_there_was_something_to_do(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    times = []
    for line in ("cpu  100 0 50 1000 7 0 3 20 9 0", "cpu  160 0 70 9000 9 0 3 40 9 0"):
        stat.write_text(f"{line}\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
        times.append(core_times(stat))
    # 60 for users, 20 for the system, 20 stolen; idle time is nobody's.
    assert stolen_share(*times) == pytest.approx(0.2)


def test_nothing_is_known_without_such_a_file(tmp_path: Path) -> None:
    assert core_times(tmp_path / "none") == ()
    (tmp_path / "other").write_text("intr 1 2 3\n")
    assert core_times(tmp_path / "other") == ()
    assert stolen_share((), ()) == 0.0


def test_cores_that_did_nothing_lost_nothing() -> None:
    assert stolen_share((1,) * 8, (1,) * 8) == 0.0
