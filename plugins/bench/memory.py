"""How much memory a block of iterations takes on one rank."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

__all__ = ["peak_bytes", "reset_peak", "state_bytes"]

_KIB = 1024


def reset_peak() -> int:
    """Bytes that the process has in memory now; its peak counts from here on (Linux, proc(5)).

    Where the kernel does not allow that, the peak stays that of the process.
    """
    # What was freed would count as there, and be used again without counting.
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most bytes that the process had in memory since `reset_peak`."""
    return _status("VmHWM")


def state_bytes(optimizer: Any) -> int:
    """Bytes of the optimizer's state on this rank; of a sharded one, of the part that is here."""
    optimizer = getattr(optimizer, "optim", optimizer)
    return sum(
        getattr(tensor, "_local_tensor", tensor).nbytes
        for entry in dict.values(getattr(optimizer, "state", {}))
        for tensor in _tensors(entry)
    )


def _tensors(entry: Any) -> Iterator[Any]:
    return (value for value in entry.values() if isinstance(value, torch.Tensor))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(_KIB * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
