"""A parameter server of MXNet on loopback: scheduler, servers and workers, real processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from time import monotonic

from builds import python_with
from paths import ROOT, SCRIPTS

from bytesched.environment import child_environment
from bytesched.lab.ports import free_port


@dataclass(frozen=True)
class Ended:
    """How a worker ended."""

    code: int | None
    output: str


class Cluster:
    """Two workers run cases of `mxnet_cases.py`, beside a scheduler and servers."""

    def __init__(self, *cases: str, servers: int = 1) -> None:
        self._environment = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(free_port()),
            "DMLC_NODE_HOST": "127.0.0.1",
            "DMLC_NUM_SERVER": str(servers),
            "DMLC_NUM_WORKER": "2",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        self._python = python_with("mxnet")
        self._processes: list[subprocess.Popen[str]] = []
        idle = ["-c", "import mxnet"]
        self._start("scheduler", idle)
        self.servers = [self._start("server", idle) for _ in range(servers)]
        command = [str(SCRIPTS / "mxnet_cases.py"), *cases]
        self.workers = [self._start("worker", command) for _ in range(2)]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()

    def wait(self, timeout_s: float = 150.0) -> list[Ended]:
        """How the workers ended; a code of None means that one had not, in this time."""
        deadline = monotonic() + timeout_s
        ended = []
        for worker in self.workers:
            code: int | None = None
            try:
                output, _ = worker.communicate(timeout=max(0.1, deadline - monotonic()))
                code = worker.returncode
            except subprocess.TimeoutExpired:
                worker.kill()
                output, _ = worker.communicate()
            ended.append(Ended(code, output))
        return ended

    def _start(self, role: str, command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [self._python, *command],
            env=child_environment({**self._environment, "DMLC_ROLE": role}),
            cwd=os.sep,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes.append(process)
        return process
