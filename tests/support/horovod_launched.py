"""Runs cases and scripts on Horovod ranks, started by Horovod's own launchers on loopback."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from rank_worker import Launch, dump
from ranks import HOROVOD, ExitedRank, RankFailure, address_of
from warm_python import warm_python

Kind = Literal["gloo", "mpi"]
START_S = 90.0
# What a launcher gets to end by itself once its ranks are gone.
LAUNCHER_GRACE_S = 10.0
# What a rank gets to write its stacks.
STACKS_S = 5.0
WORKER = Path(__file__).with_name("horovod_worker.py")
LAUNCHERS: dict[Kind, str] = {"gloo": "horovodrun", "mpi": "mpirun"}
LOOPBACK_FLAGS: dict[Kind, list[str]] = {
    "gloo": ["--gloo", "--network-interfaces", "lo", "--disable-cache"],
    "mpi": [
        *("--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "--mca", "pml", "ob1"),
        *("--mca", "btl_tcp_if_include", "lo", "--mca", "mpi_yield_when_idle", "1"),
    ],
}
# Gives every process a folder <rank>.<n> with its output and, in the end, its exit code; n counts
# the processes that were this rank (elastic runs start new ones). The trap keeps the shell alive
# for that when a launcher ends its processes; they do not inherit it.
RANK_SHELL = """
folder=$1/ranks; shift
rank=${HOROVOD_RANK:-$OMPI_COMM_WORLD_RANK}
n=0
until mkdir "$folder/$rank.$n" 2>/dev/null; do n=$((n + 1)); done
own=$folder/$rank.$n
echo $$ >"$own/shell"
ulimit -c 0
trap : TERM INT HUP
"$@" >"$own/out" 2>"$own/err"
code=$?
echo $code >"$own/code.new"
mv "$own/code.new" "$own/code"
exit $code
"""


@dataclass(frozen=True)
class HorovodExits:
    """How a run ended; `ranks` by rank, and by start where an elastic run reused a rank."""

    launcher: ExitedRank
    ranks: list[ExitedRank]


def run_fresh_horovod(
    what: Path | Callable[..., object],
    kind: Kind = "gloo",
    world_size: int = 2,
    timeout_s: float = 150.0,
    env: Mapping[str, str] | None = None,
    args: tuple[object, ...] = (),
    launcher_args: Sequence[str] = (),
) -> HorovodExits:
    """How fresh processes ended that each ran the script `what`, or `what(*args)` after `hvd.init`.

    After `timeout_s` seconds from the ranks' start what still runs is killed, its stacks in
    `stderr` and its code -9.
    `launcher_args` are more flags for the launcher.
    """
    with tempfile.TemporaryDirectory(prefix="horovod-") as name:
        folder = Path(name)
        if isinstance(what, Path):
            command = [warm_python(*HOROVOD), str(what), *map(str, args)]
        else:
            request = folder / "launch"
            request.write_bytes(dump(Launch(case=address_of(what), args=args)))
            command = [warm_python(*HOROVOD), str(WORKER), str(request)]
        began = time.time()
        launcher = _launch(kind, world_size, folder, command, launcher_args, env)
        try:
            _await_start(launcher, folder, world_size)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(timeout=timeout_s)
        finally:
            _end(launcher, folder)
        ended = time.time()
        return HorovodExits(
            ExitedRank(
                code=launcher.returncode,
                stdout=(folder / "launcher.out").read_text(errors="replace"),
                stderr=(folder / "launcher.err").read_text(errors="replace"),
                seconds=ended - began,
            ),
            [_exited(own, began, ended) for own in _rank_folders(folder)],
        )


def why_missing(kind: Kind) -> str:
    """What tests of this kind lack here; empty if nothing."""
    if importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed: ./scripts/setup builds it"
    if _launcher_path(kind) is None:
        return f"there is no {LAUNCHERS[kind]}: ./scripts/setup installs Open MPI and Horovod"
    return "" if kind in _controllers() else f"this Horovod was built without {kind}"


@cache
def _controllers() -> frozenset[str]:
    found = subprocess.run(
        [
            *(warm_python(*HOROVOD), "-c"),
            "import horovod.torch as h; print(h.gloo_built(), h.mpi_built())",
        ],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    if found.returncode != 0:
        raise RankFailure(f"horovod.torch cannot be imported\n{found.stderr[-3000:]}")
    gloo, mpi = (answer == "True" for answer in found.stdout.split()[-2:])
    return frozenset([*(["gloo"] if gloo else []), *(["mpi"] if mpi else [])])


def _launcher_path(kind: Kind) -> str | None:
    return shutil.which(LAUNCHERS[kind], path=_search_path())


def _search_path() -> str:
    # The environment that the tests run in comes first, activated or not.
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def _launch(
    kind: Kind,
    world_size: int,
    folder: Path,
    command: Sequence[str],
    launcher_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    path = _launcher_path(kind)
    assert path is not None, why_missing(kind)
    # Horovod's is a script, which imports Horovod to see what it was built with.
    launcher = [path] if kind == "mpi" else [warm_python(*HOROVOD), path]
    (folder / "ranks").mkdir()
    (folder / "tmp").mkdir()
    environment = {
        **os.environ,
        "PATH": _search_path(),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONFAULTHANDLER": "1",
        # Open MPI leaves files behind when a rank is killed.
        "TMPDIR": str(folder / "tmp"),
        "OMPI_MCA_btl_sm_backing_directory": str(folder / "tmp"),
        **(env or {}),
    }
    shell = ["/bin/sh", "-c", RANK_SHELL, "rank", str(folder), *command]
    with (folder / "launcher.out").open("wb") as out, (folder / "launcher.err").open("wb") as err:
        return subprocess.Popen(
            [*launcher, *LOOPBACK_FLAGS[kind], "-np", str(world_size), *launcher_args, *shell],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
        )


def _await_start(launcher: subprocess.Popen[bytes], folder: Path, world_size: int) -> None:
    """Return when all ranks have started, or none will any more."""
    deadline = time.monotonic() + START_S
    while len(_rank_folders(folder)) < world_size and launcher.poll() is None:
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _end(launcher: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill the ranks that still run, their stacks on stderr, and see the launcher end."""
    began = time.monotonic()
    told: dict[int, float] = {}
    # A rank may only be about to start: look again until the launcher is gone.
    while True:
        shells, ranks = _running(folder)
        for pid in ranks:
            if pid not in told:
                told[pid] = time.monotonic()
                _send(pid, signal.SIGABRT)
            elif time.monotonic() > told[pid] + STACKS_S:
                _send(pid, signal.SIGKILL)
        if not ranks and launcher.poll() is not None:
            return
        if time.monotonic() > began + LAUNCHER_GRACE_S:
            launcher.kill()
            launcher.wait()
            for pid in shells + ranks:
                _send(pid, signal.SIGKILL)
            return
        time.sleep(0.02)


def _running(folder: Path) -> tuple[list[int], list[int]]:
    """Process ids of shells and ranks that have not ended, and are late from now on."""
    shells: list[int] = []
    ranks: list[int] = []
    for own in _rank_folders(folder):
        if not (own / "code").exists():
            (own / "late").touch()
            with contextlib.suppress(FileNotFoundError, ValueError):
                shell = int((own / "shell").read_text())
                children = Path(f"/proc/{shell}/task/{shell}/children").read_text()
                shells.append(shell)
                ranks += map(int, children.split())
    return shells, ranks


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _rank_folders(folder: Path) -> list[Path]:
    found = (folder / "ranks").iterdir()
    return sorted(found, key=lambda own: [int(part) for part in own.name.split(".")])


def _exited(own: Path, began: float, ended: float) -> ExitedRank:
    code_file = own / "code"
    if code_file.exists() and not (own / "late").exists():
        shell_code, ended = int(code_file.read_text()), code_file.stat().st_mtime
        code = 128 - shell_code if shell_code > 128 else shell_code
    else:
        code = -signal.SIGKILL
    return ExitedRank(
        code=code,
        stdout=(own / "out").read_text(errors="replace"),
        stderr=(own / "err").read_text(errors="replace"),
        seconds=ended - began,
    )
