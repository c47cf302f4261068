"""What the kernel tells: memory of this process, and time that the cores did not get."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

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
        for tensor in entry.values()
        if isinstance(tensor, torch.Tensor)
    )


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(_KIB * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


_STAT: Final = Path("/proc/stat")
#: of the columns of its first line (proc(5)); guest times, behind these, are in the first two
_COLUMNS: Final = 8
_IDLE, _WAITING, _STOLEN = 3, 4, 7


def core_times(stat: Path = _STAT) -> tuple[int, ...]:
    """What all cores did since they were started, in ticks; nothing where there is no /proc."""
    try:
        name, *ticks = stat.read_text().partition("\n")[0].split()
    except (OSError, ValueError):
        return ()
    return tuple(map(int, ticks[:_COLUMNS])) if name == "cpu" and len(ticks) >= _COLUMNS else ()


def stolen_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Of the time in which the cores had something to do, what was stolen; 0 if it is unknown."""
    spent = [now - then for then, now in zip(before, after, strict=True)]
    busy = sum(spent) - spent[_IDLE] - spent[_WAITING] if spent else 0
    # Some kernels count backwards now and then.
    return max(0, spent[_STOLEN]) / busy if busy > 0 else 0.0
