"""What takes tensors past `__torch_function__` waits for them, and tells who watches."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Backend, HashStore

from bytesched.plugins.proxies import entries
from bytesched.plugins.proxies.entries import guard_entries
from bytesched.plugins.proxies.pending import hold

KINDS = [dist.ProcessGroup, Backend]
if hasattr(_distributed_c10d, "Window"):
    KINDS += [_distributed_c10d.Window]


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_of_process_groups_that_takes_tensors_waits(kind: type) -> None:
    guard_entries()
    takes = {
        name
        for name, method in vars(kind).items()
        # Of pybind11: the signatures stand in it.
        if any(
            re.search(r"\(.*torch\.Tensor.*\) ->", line)
            for line in (getattr(inspect.unwrap(method), "__doc__", None) or "").splitlines()
        )
    }
    assert takes & {"allreduce", "put"}
    assert {name for name in takes if not hasattr(getattr(kind, name), "__wrapped__")} == set()


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank of torch.distributed."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("other", [torch.float64, torch.float32])
def test_what_decides_numbers_is_changed_behind_updates_that_are_owed(
    monkeypatch: pytest.MonkeyPatch, other: torch.dtype
) -> None:
    guard_entries()
    found: list[object] = []

    class Session:
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        def flush(self) -> None:
            found.append((self.error, torch.get_default_dtype()))

    sessions = [Session(None), Session(ArithmeticError("lost"))]
    monkeypatch.setattr(entries, "sessions", lambda: sessions)
    torch.set_default_dtype(other)
    monkeypatch.undo()
    torch.set_default_dtype(torch.float32)
    assert found == ([(None, torch.float32)] if other is torch.float64 else [])


def test_what_a_group_sends_is_waited_for(alone: None) -> None:
    guard_entries()
    parameter = nn.Parameter(torch.ones(4))
    waited: list[nn.Parameter] = []
    hold(parameter, lambda: waited.append(parameter))
    world: Any = dist.group.WORLD
    world.broadcast([parameter])
    assert len(waited) == 1
