"""Process groups of our own: of which kind, over which devices, and what if none connect."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from together import together
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from bytesched.errors import PeerLost, SchedulerTimeout
from bytesched.plugins.routes import opening
from bytesched.plugins.routes.group import Group
from bytesched.plugins.routes.opening import kind_of, open_gloo, shared_devices

TIMEOUT_S = 60.0
GLOO: Any = dist.ProcessGroupGloo


class Gloo:
    """`ProcessGroupGloo`, with something done once this rank is connected.

    Args:
        then: called with the rank.
    """

    def __init__(self, then: Callable[[int], object]) -> None:
        self._then = then

    def __call__(self, store: Store, rank: int, size: int, options: Any) -> Any:
        backend = GLOO(store, rank, size, options)
        self._then(rank)
        return backend

    def __getattr__(self, name: str) -> Any:
        return getattr(GLOO, name)


def opened(store: Store, rank: int, size: int = 2) -> Group:
    parts = PrefixStore("data", store)
    return open_gloo(parts, store, rank, size, name="session1/data", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gloo", "gloo"), ("nccl", "nccl"), ("nccl2", "nccl"), ("nccl-lazy", "nccl"), ("mpi", "mpi")],
)
def test_every_engine_of_nccl_is_nccl(name: str, kind: str) -> None:
    base: Any = Mock()
    base._get_backend.return_value.name.return_value = name
    assert kind_of(base, torch.device("cpu")) == kind
    base._get_backend.assert_called_once_with(torch.device("cpu"))


def test_no_rank_goes_on_before_all_are_connected() -> None:
    """One that did might raise, and close what the others still connect."""
    store, gone_on, found = HashStore(), threading.Event(), []

    def then(rank: int) -> None:
        if rank == 1:
            found.append(gone_on.wait(0.5))

    def work(rank: int) -> None:
        group = opened(store, rank)
        gone_on.set()
        group.close()

    with patch.object(dist, "ProcessGroupGloo", Gloo(then)):
        together(work)
    assert found == [False]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("connectFullMesh failed with Connection closed by peer [127.0.0.1]:59106", PeerLost),
        ("wait timeout after 1800000ms, keys: /0/1", SchedulerTimeout),
    ],
)
def test_what_another_rank_said_is_told(said: str, kind: type[Exception]) -> None:
    store = HashStore()
    alone = opened(store, 0, size=1)
    alone.leave_note("PluginError: hosts have different numbers of ranks")
    alone.close()
    broken = Mock(wraps=GLOO, side_effect=RuntimeError(said), _Options=GLOO._Options)
    with patch.object(dist, "ProcessGroupGloo", broken), pytest.raises(kind) as caught:
        opened(store, 1)
    assert said in str(caught.value)
    assert "rank 0 said: PluginError: hosts have different numbers of ranks" in str(caught.value)


# -- devices ---------------------------------------------------------------------------


class Devices:
    """Makes texts that say how a device was made."""

    def create_default_device(self, **options: Any) -> list[Any]:
        return ["default", options]

    def create_device(self, **options: Any) -> list[Any]:
        return [options]


class LazyDevices(Devices):
    """Where connections may be made late (torch 2.8 and later)."""

    def create_default_device(self, **options: Any) -> list[Any]:
        """create_default_device(lazy_init: bool | None = None)"""
        return super().create_default_device(**options)


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that Gloo is given; none at first."""
    names: list[str] = []
    monkeypatch.setattr(opening, "gloo_interfaces", lambda: list(names))
    monkeypatch.setattr(opening, "_devices", {})
    monkeypatch.setattr(opening, "dist", SimpleNamespace(ProcessGroupGloo=Devices()))
    return names


def test_one_use_in_one_process_has_the_same_devices(
    interfaces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked child has none of the threads."""
    first = shared_devices("data")
    assert shared_devices("data") is first
    assert shared_devices("control")[0] is not first[0]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    child = shared_devices("data")
    assert child[0] is not first[0]
    assert shared_devices("data") is child


@pytest.mark.parametrize(
    ("made", "options"), [(Devices, {}), (LazyDevices, {"lazy_init": False})], ids=["old", "lazy"]
)
def test_there_is_one_for_each_interface_and_ranks_connect_at_once(
    interfaces: list[str], monkeypatch: pytest.MonkeyPatch, made: Any, options: Any
) -> None:
    monkeypatch.setattr(opening, "dist", SimpleNamespace(ProcessGroupGloo=made()))
    assert shared_devices("data") == [["default", options]]
    interfaces += ["eth1", "eth0"]
    assert shared_devices("data") == [[{"interface": name} | options] for name in interfaces]
