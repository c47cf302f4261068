"""What `bytesched doctor` tries out: torch, in processes of their own and with a deadline.

A broken installation or network is then reported and not suffered.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytesched.config import FIELDS, variable
from bytesched.doctor.checks import Check
from bytesched.environment import child_environment

WORKER = "bytesched.plugins.doctor_rank"
WORLD_SIZE = 2
_REPORT = "report it with this output: bytesched does not work with this torch"
#: settings of the user and the ranks of a launcher do not reach the workers
_CLEARED = ["RANK", "WORLD_SIZE", *map(variable, FIELDS)]


def backends(timeout_s: float) -> list[Check]:
    """Ask torch which backends and devices it has."""
    [answer] = _run_workers([["backends"]], timeout_s)
    if isinstance(answer, str):
        return [Check("backends", "fail", answer, "reinstall torch: importing it fails or hangs")]
    found = [name for name in ("gloo", "nccl", "mpi") if answer[name]]
    checks = [
        Check("backends", "ok", ", ".join(found))
        if "gloo" in found
        else Check("backends", "fail", ", ".join(found) or "none", "install a torch with Gloo")
    ]
    devices = answer["devices"]
    checks.append(Check("devices", "ok", ", ".join(devices) if devices else "cpu only"))
    return checks


def loopback(timeout_s: float) -> list[Check]:
    """Let two processes on this machine all-reduce over Gloo."""
    answers, errors = _run_ranks("loopback", timeout_s)
    if errors:
        fix = "set GLOO_SOCKET_IFNAME to an interface that is up, such as lo; look for a firewall"
        return [Check("loopback", "fail", errors, fix)]
    small_ms, large_ms = (
        max(answer[name] for answer in answers) for name in ("small_ms", "large_ms")
    )
    large = f"{answers[0]['large_bytes'] >> 20} MiB in {large_ms:.1f} ms"
    return [Check("loopback", "ok", f"two processes all-reduce 4 B in {small_ms:.2f} ms, {large}")]


def training(timeout_s: float) -> list[Check]:
    """Let two processes take a few steps, with plain DDP and with bytesched, and compare."""
    answers, errors = _run_ranks("training", timeout_s)
    if errors:
        return [Check("training", "fail", errors, _REPORT)]
    steps, crossed = answers[0]["steps"], min(answer["crossed_steps"] for answer in answers)
    if not all(answer["equal"] for answer in answers):
        return [Check("training", "fail", f"{steps} steps differ from those of plain DDP", _REPORT)]
    detail = f"{steps} steps equal those of plain DDP, {crossed} of them across the barrier"
    return [
        Check("training", "ok", detail) if crossed else Check("training", "warn", detail, _REPORT)
    ]


def _run_ranks(command: str, timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """Run the worker as every rank of a world; return the answers and what failed."""
    with tempfile.TemporaryDirectory(prefix="bytesched-doctor-") as folder:
        store = str(Path(folder) / "store")
        answers = _run_workers(
            [[command, str(rank), store, str(timeout_s)] for rank in range(WORLD_SIZE)], timeout_s
        )
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(answers) if isinstance(text, str)]
    return [answer for answer in answers if not isinstance(answer, str)], "; ".join(failed)


def _run_workers(commands: Sequence[Sequence[str]], timeout_s: float) -> list[dict[str, Any] | str]:
    """Run the worker once per command, side by side; each answers its JSON or what failed."""
    deadline_s = time.monotonic() + timeout_s
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", WORKER, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(dict.fromkeys(_CLEARED)),
        )
        for command in commands
    ]
    try:
        return [_answer(worker, deadline_s - time.monotonic(), timeout_s) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _answer(
    worker: subprocess.Popen[str], remaining_s: float, timeout_s: float
) -> dict[str, Any] | str:
    try:
        output, errors = worker.communicate(timeout=max(remaining_s, 0))
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    if worker.returncode != 0:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        return f"exit code {worker.returncode}: {lines[-1] if lines else 'nothing on stderr'}"
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer
