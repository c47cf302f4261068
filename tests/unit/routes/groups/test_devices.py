"""Gloo's devices are shared by groups of one use, one process and the same interfaces."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from bytesched.plugins.routes.groups import opening as devices
from bytesched.plugins.routes.groups.opening import shared_devices


class Gloo:
    """Makes texts that say how a device was made."""

    def create_default_device(self, **options: Any) -> list[Any]:
        return ["default", options]

    def create_device(self, **options: Any) -> list[Any]:
        return [options]


class LazyGloo(Gloo):
    """Where connections may be made late (torch 2.8 and later)."""

    def create_default_device(self, **options: Any) -> list[Any]:
        """create_default_device(lazy_init: bool | None = None)"""
        return super().create_default_device(**options)


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that Gloo is given; none at first."""
    names: list[str] = []
    monkeypatch.setattr(devices, "gloo_interfaces", lambda: list(names))
    monkeypatch.setattr(devices, "_devices", {})
    monkeypatch.setattr(devices, "dist", SimpleNamespace(ProcessGroupGloo=Gloo()))
    return names


def test_one_use_has_the_same_devices_and_another_has_others(interfaces: list[str]) -> None:
    first = shared_devices("data")
    assert shared_devices("data") is first
    other = shared_devices("control")
    assert other is not first
    assert other[0] is not first[0]


def test_a_forked_child_makes_its_own(
    interfaces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has none of the threads."""
    first = shared_devices("data")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    child = shared_devices("data")
    assert child is not first
    assert child[0] is not first[0]
    assert shared_devices("data") is child


def test_there_is_one_for_each_interface_in_their_order(interfaces: list[str]) -> None:
    assert shared_devices("data") == [["default", {}]]
    interfaces += ["eth1", "eth0"]
    assert shared_devices("data") == [[{"interface": "eth1"}], [{"interface": "eth0"}]]


def test_ranks_connect_at_once_whatever_the_script_wants(
    interfaces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "dist", SimpleNamespace(ProcessGroupGloo=LazyGloo()))
    assert shared_devices("data") == [["default", {"lazy_init": False}]]
    interfaces.append("eth0")
    assert shared_devices("data") == [[{"interface": "eth0", "lazy_init": False}]]
