"""What `bytesched doctor` reads of Horovod: its launchers, and settings that are in the way.

Horovod takes its settings from the environment when it starts, and cuts a value off where it stops
being a number.
"""

from __future__ import annotations

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

LAUNCHERS = ("horovodrun", "mpirun")
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
#: settings that are numbers
NUMBERS = (
    "CACHE_CAPACITY",
    "CYCLE_TIME",
    "FUSION_THRESHOLD",
    "STALL_CHECK_TIME_SECONDS",
    "STALL_SHUTDOWN_TIME_SECONDS",
)
#: for mpirun to print its version
TIMEOUT_S = 10.0


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
    """Say which of Horovod's settings are read otherwise than written, or are in the way."""
    found = [
        (
            f"HOROVOD_{name}={horovod_variable(name)} is read as {horovod_number(name, 0):g}",
            "write a plain number",
        )
        for name in NUMBERS
        if not is_horovod_number(name)
    ]
    if horovod_autotunes():
        found.append(
            (
                "HOROVOD_AUTOTUNE is on: bytesched leaves the optimizer as it is",
                "unset HOROVOD_AUTOTUNE to have bytesched schedule",
            )
        )
    capacity = horovod_cache_capacity()
    if 0 < capacity < HOROVOD_CACHE_CAPACITY:
        found.append(
            (
                f"HOROVOD_CACHE_CAPACITY={capacity}: beyond so many chunks, every tensor is "
                "negotiated again in every step",
                "unset it, or set it to the number of chunks, if that is higher",
            )
        )
    if horovod_variable("FUSION_THRESHOLD") and horovod_variable("CYCLE_TIME"):
        found.append(
            (
                "HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME are both set: Horovod then "
                "crashes in a second hvd.init(), as in an elastic run",
                "unset one of them if ranks come and go",
            )
        )
    checks = [Check("horovod settings", "warn", detail, fix) for detail, fix in found]
    return checks or [Check("horovod settings", "ok", "none stands in bytesched's way")]


def _open_mpi_release() -> int:
    """The first number of the version of Open MPI; 0 if there is none, or it is unknown."""
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
