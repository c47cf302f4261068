"""What `bytesched doctor` looks at: each check is a function that returns `Check`s."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bytesched.config import Config
from bytesched.environment import (
    HOROVOD_CACHE_CAPACITY,
    gloo_interfaces,
    horovod_autotunes,
    horovod_cache_capacity,
    horovod_variable,
    rank_view,
    seen_variables,
)
from bytesched.errors import BytesschedError, ConfigError
from bytesched.lab.hosts import Lab
from bytesched.version import __version__

Status = Literal["ok", "absent", "warn", "fail"]

OLDEST_TORCH = (2, 4)
#: optional package -> the extra that brings it
OPTIONAL = {
    "numpy": "report",
    "matplotlib": "report",
    "scikit-learn": "tune",
    "horovod": "horovod",
    "mpi4py": "mpi",
    "ortools": "pipeline",
}


@dataclass(frozen=True)
class Check:
    """One finding: "fail" stops training, "warn" may, "absent" is optional and not there."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def versions() -> list[Check]:
    """Check python, bytesched and torch."""
    checks = [
        Check("python", "ok", f"{platform.python_version()} on {platform.platform()}"),
        Check("bytesched", "ok", f"{__version__} in {Path(__file__).parents[1]}"),
    ]
    found = installed("torch")
    oldest = ".".join(map(str, OLDEST_TORCH))
    install = "pip install 'bytesched[torch]'"
    if not found:
        checks.append(Check("torch", "fail", "not installed", install))
    elif _leading_numbers(found) < OLDEST_TORCH:
        checks.append(Check("torch", "fail", f"{found}, older than {oldest}", install))
    else:
        checks.append(Check("torch", "ok", found))
    return checks


def optional_packages() -> list[Check]:
    """List what the extras would add, with the version or the command that installs it."""
    checks = []
    for package, extra in OPTIONAL.items():
        found = installed(package)
        checks.append(
            Check(package, "ok", found)
            if found
            else Check(package, "absent", f"not installed (pip install 'bytesched[{extra}]')")
        )
    return checks


def environment() -> list[Check]:
    """Check ranks, the variables that bear on a distributed run, and the cores."""
    view = rank_view()
    detail = f"rank {view.rank} of {view.world_size}, launcher {view.launcher}"
    checks = [
        Check("ranks", "ok", detail)
        if view.rank < view.world_size
        else Check("ranks", "fail", detail, "ranks count from 0: unset or correct the variables")
    ]
    seen = seen_variables()
    checks.append(
        Check("variables", "ok", ", ".join(f"{k}={v}" for k, v in seen.items()) or "none")
    )
    cores = len(os.sched_getaffinity(0))
    threads = seen.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > cores:
        fix = f"set OMP_NUM_THREADS to {cores} or less"
        checks.append(Check("cores", "warn", f"{cores}, but OMP_NUM_THREADS={threads}", fix))
    else:
        checks.append(Check("cores", "ok", str(cores)))
    return checks


def configuration() -> list[Check]:
    """Check that the configuration in force can be read."""
    try:
        config = Config.load()
    except ConfigError as error:
        return [Check("config", "fail", str(error), "correct or remove it")]
    changed = [f"{name}={value}" for name, value, origin in config.explain() if origin != "default"]
    return [Check("config", "ok", ", ".join(changed) or "all defaults")]


def network() -> list[Check]:
    """Check the names that Gloo and the rendezvous have to resolve, and the interface chosen."""
    seen = seen_variables()
    checks = []
    chosen = gloo_interfaces()
    present = [name for _, name in socket.if_nameindex()]
    absent = [name for name in chosen if name not in present]
    if absent:
        fix = f"set GLOO_SOCKET_IFNAME to one of {', '.join(present)}"
        checks.append(Check("interface", "fail", f"there is no {', '.join(absent)}", fix))
    else:
        detail = ", ".join(chosen) or f"Gloo's choice of {', '.join(present)}"
        checks.append(Check("interface", "ok", detail))
    hosts = {"hostname": socket.gethostname(), "MASTER_ADDR": seen.get("MASTER_ADDR", "")}
    for name, host in hosts.items():
        if not host:
            continue
        try:
            addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)})
        except OSError as error:
            fix = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME" if name == "hostname" else ""
            status: Status = "warn" if name == "hostname" else "fail"
            checks.append(Check(name, status, f"{host} does not resolve: {error}", fix))
        else:
            checks.append(Check(name, "ok", f"{host} is {', '.join(addresses)}"))
    return checks


def emulated_hosts() -> list[Check]:
    """See whether `bytesched bench --lab` can shape the links of emulated hosts here."""
    try:
        with Lab(hosts=2) as lab:
            return [Check("lab", "ok" if lab.shaped else "absent", lab.reason)]
    except BytesschedError as error:
        return [Check("lab", "absent", str(error))]


def horovod() -> list[Check]:
    """Say which of Horovod's settings are in the way."""
    capacity = horovod_cache_capacity()
    found = (
        (
            horovod_autotunes(),
            "HOROVOD_AUTOTUNE is on: bytesched leaves the optimizer as it is",
            "unset HOROVOD_AUTOTUNE to have bytesched schedule",
        ),
        (
            0 < capacity < HOROVOD_CACHE_CAPACITY,
            f"HOROVOD_CACHE_CAPACITY={capacity}: beyond so many chunks, every tensor is negotiated "
            "again in every step",
            "unset it, or set it to the number of chunks, if that is higher",
        ),
        (
            horovod_variable("FUSION_THRESHOLD") and horovod_variable("CYCLE_TIME"),
            "HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME are both set: Horovod then crashes in "
            "a second hvd.init(), as in an elastic run",
            "unset one of them if ranks come and go",
        ),
    )
    checks = [
        Check("horovod settings", "warn", detail, fix) for is_so, detail, fix in found if is_so
    ]
    return checks or [Check("horovod settings", "ok", "none stands in bytesched's way")]


def installed(package: str) -> str:
    """The version of an installed package, or nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _leading_numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in itertools.takewhile(str.isdecimal, parts))
