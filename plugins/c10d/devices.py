"""Gloo's devices, each a thread over sockets: shared by all groups of a process."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch.distributed as dist

from bytesched.environment import gloo_interfaces

__all__ = ["can_connect_late", "shared_devices"]

#: by the process that has their threads, which a forked child has not; interfaces; use; laziness
_devices: dict[tuple[int, tuple[str, ...], str, bool], list[Any]] = {}
_lock = threading.Lock()


def can_connect_late() -> bool:
    """Whether Gloo can connect two ranks when one of them first sends to the other: torch 2.7."""
    return "lazy_init" in (dist.ProcessGroupGloo.create_default_device.__doc__ or "")


def shared_devices(use: str, *, is_lazy: bool = False) -> list[Any]:
    """The devices of this process for groups of one use, one for each interface that Gloo is given.

    Groups share the thread that reads and writes sockets, and the port that ranks connect to. What
    one of them has under way delays the others of the same use.

    Args:
        is_lazy: whether ranks connect when they first send, where `can_connect_late`.
    """
    interfaces = tuple(gloo_interfaces())
    key = os.getpid(), interfaces, use, is_lazy
    with _lock:
        if key not in _devices:
            _devices[key] = _new_devices(interfaces, is_lazy=is_lazy)
        return _devices[key]


def _new_devices(interfaces: tuple[str, ...], *, is_lazy: bool) -> list[Any]:
    gloo: Any = dist.ProcessGroupGloo
    # Said in both cases: TORCH_GLOO_LAZY_INIT is meant for the groups of the script.
    late = {"lazy_init": is_lazy} if can_connect_late() else {}
    if not interfaces:
        return [gloo.create_default_device(**late)]
    return [gloo.create_device(interface=interface, **late) for interface in interfaces]
