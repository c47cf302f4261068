"""Models over a wire that sums late, and a device that only orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_cuda import FakeCuda, fake_cuda
from fake_wire import FakeWire, Run, alone


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """For DDP."""
    with alone():
        yield


@pytest.fixture
def device() -> Iterator[FakeCuda]:
    with fake_cuda() as device:
        yield device


@pytest.fixture
def run_of(group: None) -> Iterator[Callable[..., Run]]:
    """A run that is so many rounds old: when it is three, everything is under way, and owed."""
    runs: list[Run] = []

    def make(rounds: int = 3, *, size: int = 2, **options: Any) -> Run:
        runs.append(Run(FakeWire(size=size), **options))
        runs[-1].train(rounds)
        return runs[-1]

    yield make
    for run in runs:
        run.close()
