"""How much of its cores' time a virtual machine did not get from its host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["core_times", "stolen_share"]

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
