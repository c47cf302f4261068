"""Several NCCL ranks on one GPU: `bytesched bench --gpu-ranks`.

NCCL refuses a device to two ranks only if they are on one host. Here each is told that it has a
host of its own, so that they speak through sockets of this machine. Kernels of several processes
run side by side under MPS, a daemon of the user's; without it the processes take turns.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bytesched.environment import child_environment

_DAEMON: Final = "nvidia-cuda-mps-control"
#: beside those that PATH names
_FOLDERS: Final = "/usr/local/nvidia/bin:/usr/bin"
#: what the kernel shows of its name, and of its server's
_SHOWN: Final = "nvidia-cuda-mps"
_PATIENCE_S: Final = 20.0
_POLL_S: Final = 0.05
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def nccl_variables(rank: int) -> dict[str, str]:
    """Of the environment of a rank that shares a device with others, before its first group."""
    return {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


@contextmanager
def mps() -> Iterator[tuple[dict[str, str], str]]:
    """Runs MPS if it is installed: the variables of ranks under it, and how they share the device.

    Ranks are to be gone when it ends.
    """
    binary = shutil.which(_DAEMON) or shutil.which(_DAEMON, path=_FOLDERS)
    if binary is None:
        yield {}, f"in turns: there is no {_DAEMON}"
        return
    with TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as name:
        pipes, logs = Path(name, "pipes"), Path(name, "logs")
        for folder in (pipes, logs):
            folder.mkdir()
        variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        # Its clients number the devices that it sees.
        environment = child_environment({**variables, "CUDA_VISIBLE_DEVICES": None})
        try:
            if failure := _called([binary, "-d"], environment, logs / "start"):
                yield {}, f"in turns: {failure}"
            else:
                yield variables, "side by side, by MPS"
        finally:
            before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
            _called([binary], environment, logs / "quit", "quit\n")
            deadline_s = time.monotonic() + _PATIENCE_S
            while (left := _left(pipes)) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)


def _called(command: list[str], environment: dict[str, str], log: Path, text: str = "") -> str:
    """Runs a command of MPS on this input; why it failed, or nothing."""
    # A file: the daemon might keep a pipe open.
    with log.open("w") as told:
        try:
            subprocess.run(
                command,
                input=text,
                text=True,
                env=environment,
                stdout=told,
                stderr=told,
                timeout=_PATIENCE_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return f"{error} {' '.join(log.read_text().split())}"
    return ""


def _left(pipes: Path) -> list[int]:
    """The daemon and its servers, as far as they run."""
    found = []
    with suppress(OSError, ValueError):
        daemon = int((pipes / f"{_DAEMON}.pid").read_text())
        servers = Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()
        for pid in (daemon, *map(int, servers)):
            # One that ends meanwhile does not hide the others.
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == _SHOWN:
                    found.append(pid)
    return found
