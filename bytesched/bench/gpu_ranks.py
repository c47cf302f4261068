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
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bytesched.bench.specification import Specification, as_given, check_outputs, refuse
from bytesched.bench.systems import parse_systems
from bytesched.environment import child_environment, rank_view
from bytesched.errors import ConfigError
from bytesched.values import nearest

GPU_WORKER: Final = "bytesched.plugins.bench.gpu_worker"
MODELS: Final = ("gpt", "conv", "small")
SYSTEMS: Final = "ddp:bucket_mb=4,ddp:bucket_mb=25,ddp:bucket_mb=100,fsdp2,bytesched"
_OTHERS: Final = (
    *("lab", "workers", "rate", "emulate", "servers", "controller", "comm_ratio"),
    *("compare", "record"),
)
_DAEMON: Final = "nvidia-cuda-mps-control"
#: beside those that PATH names
_FOLDERS: Final = "/usr/local/nvidia/bin:/usr/bin"
#: what the kernel shows of its name, and of its server's
_SHOWN: Final = "nvidia-cuda-mps"
_PATIENCE_S: Final = 20.0
_POLL_S: Final = 0.05

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def gpu_specification(options: Namespace) -> Specification:
    """What the options ask for. Raises `ConfigError` for what cannot be run."""
    if rank_view().launcher != "none":
        raise ConfigError("--gpu-ranks starts the ranks itself: leave the launcher out")
    refuse(options, "--gpu-ranks", *_OTHERS)
    model = options.model or MODELS[0]
    if model not in MODELS:
        raise ConfigError(f"--model {model!r}{nearest(model, MODELS)}")
    if len(options.batch) > 1 or options.batch[0] < 0:
        raise ConfigError("--batch: one size with --gpu-ranks, or 0 for the model's own")
    check_outputs(options)
    systems = parse_systems(options.systems or SYSTEMS, ("ddp", "fsdp2", "bytesched"))
    return as_given(options, systems=systems, model=model, workers=options.gpu_ranks)


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
