"""What each thread of this process has used: CPU time, and how often it waited."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["Usage", "usage", "used"]

_TASKS: Final = Path("/proc/self/task")
_MS: Final = 1e6


@dataclass(frozen=True, slots=True)
class Usage:
    """Of the threads with one name, since they began."""

    cpu_ns: int = 0
    #: how often they gave up their core to wait for something, the GIL for instance
    waits: int = 0
    #: how often their core was taken from them
    preempted: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.cpu_ns + other.cpu_ns, self.waits + other.waits, self.preempted + other.preempted
        )


def usage() -> dict[str, Usage]:
    """By name of the thread, Python's or else the system's; empty where there is no /proc."""
    named = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    found: dict[str, Usage] = {}
    for number, system_name, its in _threads():
        name = named.get(number, system_name)
        found[name] = found.get(name, Usage()) + its
    return found


def used(
    before: Mapping[str, Usage], after: Mapping[str, Usage], iterations: int
) -> dict[str, dict[str, float]]:
    """What was used in between, for each iteration, most CPU time first."""
    none = Usage()
    spent: dict[str, dict[str, Any]] = {}
    for name, its in after.items():
        began = before.get(name, none)
        spent[name] = {
            "cpu_ms": max(0, its.cpu_ns - began.cpu_ns) / _MS / iterations,
            "waits": max(0, its.waits - began.waits) / iterations,
            "preempted": max(0, its.preempted - began.preempted) / iterations,
        }
    return dict(sorted(spent.items(), key=lambda item: -item[1]["cpu_ms"]))


def _threads() -> Iterator[tuple[str, str, Usage]]:
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        try:
            cpu_ns = int((task / "schedstat").read_text().split()[0])
            lines = (task / "status").read_text().splitlines()
        except OSError:
            # It has ended since the folder was listed.
            continue
        status = dict(line.split(":", 1) for line in lines)
        waits = int(status["voluntary_ctxt_switches"])
        preempted = int(status["nonvoluntary_ctxt_switches"])
        yield task.name, status["Name"].strip(), Usage(cpu_ns, waits, preempted)
