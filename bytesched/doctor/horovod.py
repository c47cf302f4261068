"""What `bytesched doctor` reads of Horovod: its launchers, and its settings as they will be used.

Horovod takes its settings from the environment when it starts, and cuts a value off where it stops
being a number.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from bytesched.doctor.checks import Check
from bytesched.environment import (
    HOROVOD_CACHE_CAPACITY,
    child_environment,
    horovod_autotunes,
    horovod_cache_capacity,
    horovod_number,
    horovod_variable,
    is_horovod_number,
)

__all__ = ["AS_ROOT", "launcher", "launchers", "search_path", "settings", "version"]

LAUNCHERS = ("horovodrun", "mpirun")
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
FUSION_BYTES = 128 << 20
CYCLE_MS = 1.0
STALL_WARNING_S = 60
#: what mpirun gets to tell its version
TIMEOUT_S = 10.0


def version() -> str:
    """Return the version of the installed Horovod, or nothing."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return ""


def search_path() -> str:
    """Return the PATH with the folder of this Python first, as if its environment were active."""
    return os.pathsep.join([str(Path(sys.executable).parent), _path()])


def launcher(name: str) -> str:
    """Return the path of a launcher, from beside this Python or from the PATH, or nothing."""
    return shutil.which(name, path=search_path()) or ""


def launchers() -> list[Check]:
    """Say where Horovod's launchers are, and what stands in their way."""
    checks = []
    for name in LAUNCHERS:
        found, fix = launcher(name), ""
        if not found:
            checks.append(Check(name, "absent", "not found"))
            continue
        if not shutil.which(name, path=_path()):
            fix = f"it is not on the PATH: call it in full, or add {Path(found).parent}"
        elif name == "horovodrun" and _open_mpi_release() >= 5:
            fix = (
                "beside Open MPI 5 or newer, a Horovod that was built with MPI needs horovodrun "
                "--gloo, or --binding-args='--bind-to none --map-by slot'"
            )
        elif name == "mpirun" and os.geteuid() == 0 and not _root_may_run():
            fix = f"as root, Open MPI's runs with {'=1 '.join(AS_ROOT)}=1 only"
        checks.append(Check(name, "ok", found, fix))
    return checks


def settings() -> list[Check]:
    """Say what Horovod will do with its settings, and what bytesched makes of each."""
    return [_autotune(), _fusion(), _cycle(), _cache(), _timeline(), _stalls(), *_restarts()]


def _autotune() -> Check:
    if not horovod_autotunes():
        return Check("horovod autotune", "ok", "off; bytesched chooses its own sizes")
    fix = "unset HOROVOD_AUTOTUNE to have bytesched schedule"
    return Check("horovod autotune", "warn", "on: bytesched leaves the optimizer as it is", fix)


def _fusion() -> Check:
    size_bytes = int(horovod_number("FUSION_THRESHOLD", FUSION_BYTES))
    size = f"{size_bytes / (1 << 20):g} MiB" if size_bytes >= 1 << 10 else f"{size_bytes} B"
    what = f"up to {size}" if size_bytes > 0 else "off"
    detail = f"{what}{_origin('FUSION_THRESHOLD')}; bytesched's chunks stay apart at any threshold"
    return _read_as("FUSION_THRESHOLD", f"{size_bytes} bytes", "horovod fusion", detail)


def _cycle() -> Check:
    cycle_ms = horovod_number("CYCLE_TIME", CYCLE_MS)
    detail = f"every {cycle_ms:g} ms{_origin('CYCLE_TIME')}; bytesched leaves it"
    return _read_as("CYCLE_TIME", f"{cycle_ms:g} ms", "horovod cycle", detail)


def _cache() -> Check:
    capacity = horovod_cache_capacity()
    if capacity <= 0:
        detail = f"off{_origin('CACHE_CAPACITY')}: chunks go in the order of their submission"
        return _read_as("CACHE_CAPACITY", "0", "horovod cache", detail)
    detail = (
        f"{capacity} tensors{_origin('CACHE_CAPACITY')}; chunks go in the order of the warm-up, "
        "which is that of their priority"
    )
    if capacity >= HOROVOD_CACHE_CAPACITY:
        return _read_as("CACHE_CAPACITY", str(capacity), "horovod cache", detail)
    fix = (
        f"unset HOROVOD_CACHE_CAPACITY, or set it to the number of chunks, if that is above "
        f"{capacity}: beyond it, every tensor is negotiated again in every step"
    )
    return Check("horovod cache", "warn", detail, fix)


def _timeline() -> Check:
    path = horovod_variable("TIMELINE")
    detail = f"rank 0 writes {path}" if path else "off"
    return Check("horovod timeline", "ok", f"{detail}; bytesched writes its own (timeline=FOLDER)")


def _stalls() -> Check:
    if horovod_number("STALL_CHECK_DISABLE", 0) > 0:
        return Check("horovod stall check", "ok", "off; bytesched's timeout_s stands")
    warning_s = horovod_number("STALL_CHECK_TIME_SECONDS", STALL_WARNING_S)
    shutdown_s = horovod_number("STALL_SHUTDOWN_TIME_SECONDS", 0)
    end = f"ends after {shutdown_s:g} s" if shutdown_s >= warning_s else "does not end"
    detail = f"warns after {warning_s:g} s, {end}; bytesched's timeout_s stands beside it"
    return Check("horovod stall check", "ok", detail)


def _restarts() -> list[Check]:
    if not (horovod_variable("FUSION_THRESHOLD") and horovod_variable("CYCLE_TIME")):
        return []
    detail = (
        "HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME are both set: Horovod then crashes in a "
        "second hvd.init(), as in an elastic run"
    )
    return [Check("horovod restart", "warn", detail, "unset one of them if ranks come and go")]


def _read_as(name: str, value: str, check: str, detail: str) -> Check:
    """A warning if what is set is not the number that Horovod takes it for."""
    if is_horovod_number(name):
        return Check(check, "ok", detail)
    fix = f"HOROVOD_{name}={horovod_variable(name)} is read as {value}: write a plain number"
    return Check(check, "warn", detail, fix)


def _origin(name: str) -> str:
    return f" (HOROVOD_{name})" if horovod_variable(name) else ""


def _open_mpi_release() -> int:
    """The first number of the version of Open MPI; 0 if there is none, or it does not say."""
    mpirun = launcher("mpirun")
    if not mpirun:
        return 0
    try:
        said = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r"Open MPI\) (\d+)", said)
    return int(found.group(1)) if found else 0


def _root_may_run() -> bool:
    environment = child_environment()
    return all(environment.get(name) == "1" for name in AS_ROOT)


def _path() -> str:
    return child_environment().get("PATH", "")
