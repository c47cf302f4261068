"""Where a result comes from: commit, command, machine; and its setting, apart from systems."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from bytesched.bench.specification import Specification
from bytesched.bench.systems import HOROVOD_SYSTEMS
from bytesched.environment import RankView
from bytesched.lab.ranks import threads
from bytesched.version import __version__

_ROOT = Path(__file__).parents[2]
#: folders whose changes change what is measured
_SOURCES = ("bytesched", "plugins", "tuning")
_GIT_S = 10.0
_CLASSES = {os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr"}


def provenance(command: str) -> dict[str, Any]:
    """What a reader needs to trust a result, or to measure it again; taken when a run begins."""
    return {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **source(),
        "machine": machine(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def command_of(arguments: Sequence[str]) -> str:
    """The command of a bench as it was given, with the priority that it has."""
    name, _, number = priority().partition(" ")
    before = ["chrt", f"-{name[0]}", number] if name else []
    return shlex.join([*before, "bytesched", "bench", *arguments])


def source(root: Path = _ROOT) -> dict[str, Any]:
    """Version and commit of the package in ``root``, and whether its sources differ from that.

    The commit is "" where ``root`` is not a checkout of its own.
    """
    found: dict[str, Any] = {"version": __version__, "commit": "", "dirty": False}
    # An installed package may lie in somebody else's repository.
    if Path(_git(root, "rev-parse", "--show-toplevel") or "/").resolve() == root.resolve():
        found["commit"] = _git(root, "rev-parse", "HEAD")
        found["dirty"] = bool(_git(root, "status", "--porcelain", "--", *_SOURCES))
    return found


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, kernel, and the installed torch."""
    torch, cpuinfo = "", ""
    with suppress(metadata.PackageNotFoundError):
        torch = metadata.version("torch")
    with suppress(OSError):
        cpuinfo = Path("/proc/cpuinfo").read_text()
    named = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    return {
        "cpu": named[1] if named else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "torch": torch,
    }


def priority() -> str:
    """The scheduling class and priority that ``chrt`` gave this process, such as "rr 5", or ""."""
    name = _CLASSES.get(os.sched_getscheduler(0))
    return f"{name} {os.sched_getparam(0).sched_priority}" if name else ""


def setting(spec: Specification, view: RankView) -> dict[str, Any]:
    """What two results must have in common to be compared."""
    launched = view.launcher != "none"
    names = ["ranks_per_host", "servers", "clip", "batch", "device"]
    if spec.is_any_of(HOROVOD_SYSTEMS):
        names.append("controller")
    found = {
        "ranks": view.world_size if launched else spec.hosts * spec.ranks_per_host,
        "launcher": view.launcher,
        "rate": spec.link_rate or "",
        "priority": priority(),
        "optimizer": "adamw" if spec.servers is None else "adamw, not fused",
        "emulate" if spec.profile else "model": spec.model,
        "threads": threads(),
        **{name: getattr(spec, name) for name in names},
    }
    if spec.profile:
        text = json.dumps(spec.profile.layer_records(), sort_keys=True).encode()
        # The scale is that of results of earlier versions.
        found |= {"comm_ratio": spec.comm_ratio, "compute_scale": 1.0}
        found["profile"] = hashlib.sha256(text).hexdigest()[:12]
    return found


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first setting that differs, with both values; "" if none does."""
    for name in dict.fromkeys([*old, *new]):
        before, now = (
            "not set" if its.get(name) in (None, "") else str(its[name]) for its in (old, new)
        )
        if before != now:
            return f"{name} was {before} and is {now} now"
    return ""


def _git(root: Path, *arguments: str) -> str:
    """What git says, or "" where it is missing, fails or takes too long."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(root), *arguments]
        quiet = subprocess.DEVNULL
        return subprocess.check_output(command, text=True, timeout=_GIT_S, stderr=quiet).strip()
    return ""
