"""The MPIs at hand, and ranks under the launcher of each; run as a test's own process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from paths import SCRIPTS
from warm_python import warm_python

LIMIT_S = 200.0
#: how long a launcher may go on after its last rank; Open MPI's now and then never ends when it
#: was to outlive one
ALONE_S = 5.0
#: seen so often in a row without a rank, a launcher hangs
LOOKS = 4


@dataclass(frozen=True)
class Implementation:
    """An MPI, and how its launcher is told what the tests want."""

    name: str
    launcher: Path
    flags: tuple[str, ...]
    #: with these, the death of a rank does not end the others
    outlive: tuple[str, ...]
    environment: dict[str, str]

    def __str__(self) -> str:
        return self.name

    def run(
        self,
        ranks: int,
        script: str,
        *args: str,
        flags: Iterable[str] = (),
        started_itself: int | None = None,
    ) -> tuple[int, str]:
        """Exit code and output of ``script`` on so many ranks; fails with what hangs, and where.

        The ranks are forked from a process that has imported torch; but for one, if it is named.
        """
        flags = tuple(flags)
        run_script = [str(SCRIPTS / script), *args]
        programs = ["-np", str(ranks), warm_python(), *run_script]
        if started_itself is not None:
            each = [sys.executable if r == started_itself else warm_python() for r in range(ranks)]
            parts = [[":", "-np", "1", python, *run_script] for python in each]
            programs = list(chain(*parts))[1:]
        with subprocess.Popen(
            [str(self.launcher), *self.flags, *flags, *programs],
            env={**os.environ, **self.environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as run:
            left: dict[int, str] = {}
            alone = stopped = 0
            for _ in range(round(LIMIT_S / ALONE_S)):
                before = left
                try:
                    output, _ = run.communicate(timeout=ALONE_S)
                    return run.returncode, output.decode(errors="replace")
                except subprocess.TimeoutExpired:
                    left = _ranks(run.pid)
                alone = 0 if left else alone + 1
                stopped = stopped + 1 if left and _are_stopped(left) else 0
                if stopped == LOOKS:
                    # The others have ended, and the launcher is slow to end these.
                    for pid in left:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                if alone == LOOKS or (before and alone and set(self.outlive) <= set(flags)):
                    # Its ranks have ended, and said what they saw.
                    run.kill()
            told = _why_stuck(run, left)
            pytest.fail(f"{self.name} has not ended after {LIMIT_S:g} s; left: {left}\n{told}")


def _found(prefix: Path) -> Implementation | None:
    """The MPI that a wheel has put there; mpi4py is told which one, as it would take the venv's."""
    libraries = {
        "Open MPI": prefix / "lib" / "libmpi.so.40",
        "MPICH": prefix / "lib" / "libmpi.so.12",
    }
    name = next((name for name, library in libraries.items() if library.exists()), None)
    if name is None or importlib.util.find_spec("mpi4py") is None:
        return None
    environment = {"MPI4PY_LIBMPI": str(libraries[name])}
    if name == "MPICH":
        return Implementation(
            name, prefix / "bin" / "mpiexec", (), ("-disable-auto-cleanup",), environment
        )
    return Implementation(
        name,
        prefix / "bin" / "mpirun",
        # Without UCX, whose absence Open MPI reports for every window.
        ("--oversubscribe", "--mca", "osc", "^ucx"),
        ("--enable-recovery",),
        environment | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    )


def _ranks(launcher: int) -> dict[int, str]:
    """State (R, S, D, T, Z) and command of what ``launcher``, or its proxy, has started."""
    parents, seen = {}, {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            command = (entry.parent / "cmdline").read_bytes().replace(b"\0", b" ")
            pid = int(entry.parent.name)
            parents[pid] = int(parent)
            seen[pid] = f"{state} {command.decode(errors='replace')}"
    family = [launcher]
    for process in family:
        family += [pid for pid, parent in parents.items() if parent == process]
    return {pid: seen[pid] for pid in family[1:] if pid not in parents.values()}


def _are_stopped(left: Mapping[int, str]) -> bool:
    return all(seen.startswith("T") for seen in left.values())


def _why_stuck(run: subprocess.Popen[bytes], left: Iterable[int]) -> str:
    """Ends all; the output, with the stacks of ranks that print them on SIGUSR1."""
    for number in (signal.SIGUSR1, signal.SIGKILL):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGKILL:
            run.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return run.communicate(timeout=5.0)[0].decode(errors="replace")
    return "no output: something else keeps its end open"


#: that of the environment, which most tests take, and one that ./scripts/setup has put aside
MPIS = [found for found in map(_found, (Path(sys.prefix), Path(sys.prefix, "mpich"))) if found]
