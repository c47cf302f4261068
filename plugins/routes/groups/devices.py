"""Gloo's devices, each a thread over sockets: shared by all groups of a process."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch.distributed as dist

from bytesched.environment import gloo_interfaces

__all__ = ["shared_devices"]

#: by the process that has their threads, which a forked child has not; interfaces; and use
_devices: dict[tuple[int, tuple[str, ...], str], list[Any]] = {}
_lock = threading.Lock()


def shared_devices(use: str) -> list[Any]:
    """The devices of this process for groups of one use, one for each interface that Gloo is given.

    Groups share the thread that reads and writes sockets, and the port that ranks connect to. What
    one of them has under way delays the others of the same use.
    """
    interfaces = tuple(gloo_interfaces())
    key = os.getpid(), interfaces, use
    with _lock:
        if key not in _devices:
            _devices[key] = _new_devices(interfaces)
        return _devices[key]


def _new_devices(interfaces: tuple[str, ...]) -> list[Any]:
    gloo: Any = dist.ProcessGroupGloo
    # Whatever TORCH_GLOO_LAZY_INIT says of the script's groups: where two ranks connect only when
    # they first send, a look at a rank that died before blocks until its connection times out.
    knows_late = "lazy_init" in (gloo.create_default_device.__doc__ or "")
    late = {"lazy_init": False} if knows_late else {}
    if not interfaces:
        return [gloo.create_default_device(**late)]
    return [gloo.create_device(interface=interface, **late) for interface in interfaces]
