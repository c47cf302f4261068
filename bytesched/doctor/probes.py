"""What `bytesched doctor` tries out: torch, in processes of their own and with a deadline.

A broken installation or network is then reported and not suffered.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytesched.config import FIELDS, variable
from bytesched.doctor.checks import Check, Status
from bytesched.doctor.horovod import AS_ROOT, launcher, search_path
from bytesched.environment import child_environment

WORKER = "bytesched.plugins.doctor_rank"
WORLD_SIZE = 2
_REPORT = "report it with this output: bytesched does not work with this torch"
#: what the launcher of each of Horovod's controllers is given
LAUNCHES = {
    "gloo": ("horovodrun", ["--gloo", "--network-interfaces", "lo", "--disable-cache"]),
    "mpi": ("mpirun", ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]),
}
#: keeps what a rank writes apart from what its launcher writes
_OWN_ERRORS = 'exec "$@" 2>"$0/$$.err"'
#: what a launcher gets to end its ranks
GRACE_S = 5.0
#: settings of the user and the ranks of a launcher do not reach the workers
_CLEARED = ["RANK", "WORLD_SIZE", *map(variable, FIELDS)]
#: nor does what Horovod reads, or what a launcher around the doctor has left
_LAUNCHERS_OWN = ("HOROVOD_", "OMPI_COMM_", "PMIX_", "PRTE_")


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
    return [Check("loopback", "ok", f"two processes all-reduce {_times(answers)}")]


def training(timeout_s: float) -> list[Check]:
    """Let two processes take a few steps, with plain DDP and with bytesched, and compare."""
    answers, errors = _run_ranks("training", timeout_s)
    if errors:
        return [Check("training", "fail", errors, _REPORT)]
    return [Check("training", *_verdict(answers, "DDP"))]


def _verdict(answers: Sequence[dict[str, Any]], plain: str) -> tuple[Status, str, str]:
    steps, crossed = answers[0]["steps"], min(answer["crossed_steps"] for answer in answers)
    if not all(answer["equal"] for answer in answers):
        return "fail", f"{steps} steps differ from those of plain {plain}", _REPORT
    detail = f"{steps} steps equal those of plain {plain}, {crossed} of them across the barrier"
    return ("ok", detail, "") if crossed else ("warn", detail, _REPORT)


def horovod(timeout_s: float) -> list[Check]:
    """Ask Horovod what it was built with, and try each of its controllers that can be launched."""
    [built] = _run_workers([["horovod"]], timeout_s)
    if isinstance(built, str):
        fix = "rebuild it against this torch (see the README, Install)"
        return [Check("horovod build", "warn", built, fix)]
    controllers = [name for name in LAUNCHES if built[name]]
    operations = [name for name, there in built.items() if there]
    detail = f"controllers {', '.join(controllers) or 'none'}; operations {', '.join(operations)}"
    checks = [Check("horovod build", "ok", detail)]
    for controller in controllers:
        if launcher(LAUNCHES[controller][0]):
            checks.append(_horovod_ranks(controller, timeout_s))
    return checks


def _horovod_ranks(controller: str, timeout_s: float) -> Check:
    name, (program, flags) = f"horovod {controller}", LAUNCHES[controller]
    with tempfile.TemporaryDirectory(prefix="bytesched-doctor-") as folder:
        worker = [sys.executable, "-m", WORKER, "horovod-ranks", folder, str(timeout_s)]
        shell = ["/bin/sh", "-c", _OWN_ERRORS, folder, *worker]
        errors = _launch([launcher(program), *flags, "-np", str(WORLD_SIZE), *shell], timeout_s)
        if errors:
            own = {_last_line(path.read_text(errors="replace")) for path in _files(folder, "err")}
            errors = "; ".join([errors, *sorted(own - {""})])
        answers = [json.loads(path.read_text()) for path in _files(folder, "json")]
    fix = f"run it by hand: {program} {' '.join(flags)} -np 2 {sys.executable} -m {WORKER} "
    if errors or len(answers) < WORLD_SIZE:
        errors = errors or f"{len(answers)} of {WORLD_SIZE} ranks answered"
        return Check(name, "warn", errors, f"{fix}horovod-ranks FOLDER {timeout_s:g}")
    status, detail, fix = _verdict(answers, "Horovod")
    return Check(name, status, f"two ranks all-reduce {_times(answers)}; {detail}", fix)


def _launch(command: Sequence[str], timeout_s: float) -> str:
    """Run a launcher to its end; return what failed, or nothing."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        run = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_launch_environment(),
        )
        if not _ended(run, timeout_s):
            return f"no answer within {timeout_s:g} s"
        output.seek(0)
        said = _last_line(output.read())
    return f"exit code {run.returncode}: {said or 'nothing was said'}" if run.returncode else ""


def _ended(run: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for a launcher, and end it if that takes too long; its ranks end with it."""
    try:
        run.wait(timeout_s)
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            run.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(GRACE_S)
        return False
    return True


def _files(folder: str, suffix: str) -> list[Path]:
    return sorted(Path(folder).glob(f"*.{suffix}"))


def _last_line(text: str) -> str:
    lines = [line.strip(" -") for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "")


def _launch_environment() -> dict[str, str]:
    mine = child_environment(dict.fromkeys(_CLEARED))
    kept = {name: value for name, value in mine.items() if not name.startswith(_LAUNCHERS_OWN)}
    return {**kept, **dict.fromkeys(AS_ROOT, "1"), "PATH": search_path()}


def _times(answers: Sequence[dict[str, Any]]) -> str:
    small_ms = max(answer["small_ms"] for answer in answers)
    large_ms = max(answer["large_ms"] for answer in answers)
    large_mib = answers[0]["large_bytes"] / (1 << 20)
    return f"4 B in {small_ms:.2f} ms, {large_mib:.0f} MiB in {large_ms:.1f} ms"


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
        return f"exit code {worker.returncode}: {_last_line(errors) or 'nothing on stderr'}"
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer
