"""Several NCCL ranks on one GPU: `bytesched bench --gpu-ranks`.

NCCL refuses a device to two ranks only if they are on one host. Here each is told that it has a
host of its own, so that they speak through sockets of this machine. Kernels of several processes
run side by side under MPS, a daemon of the user's; without it the processes take turns.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bytesched.bench.provenance import measured
from bytesched.bench.specification import as_given, check_outputs, refuse
from bytesched.bench.systems import parse_systems
from bytesched.environment import child_environment, rank_view
from bytesched.errors import ConfigError
from bytesched.table import aligned
from bytesched.values import nearest

WORKER: Final = "bytesched.plugins.bench.gpu_worker"
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
#: of samples drawn anew, and the share of their ratios that an interval holds
_DRAWS: Final = 2000
_HELD: Final = 0.95
#: the relative difference of losses up to which they are those of one training
_CLOSE: Final = 1e-2
_MIB: Final = 2**20


def measure_gpu_ranks(options: Namespace, arguments: Sequence[str]) -> list[str]:
    """Measure, and write what was found; the lines of a report. Raises `ConfigError`."""
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
    with mps() as (variables, sharing):
        spec = as_given(
            options,
            systems=systems,
            model=model,
            workers=options.gpu_ranks,
            device=options.device or "cuda",
            variables=variables,
            sharing=sharing,
        )
        return report(measured(spec, WORKER, arguments))


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


def report(found: Mapping[str, Any]) -> list[str]:
    """The lines of a report: what was measured, a table of systems, traces if there are any."""
    spec, systems = found["specification"], found["systems"]
    bounds = {
        name: statistics.median(turn[name] for turn in found["bounds"])
        for name in found["bounds"][0]
    }
    chunked = {name: ms for name, ms in bounds.items() if name.startswith("both_")}
    best = min(chunked, key=chunked.__getitem__)
    clipped = f", clipped to {spec['clip']:g}" if spec["clip"] else ""
    lines = [
        f"{found['ranks']} ranks on one device ({found['device']}), {found['carrier']}; "
        f"processes run {spec['sharing']}",
        f"{spec['model']}: {found['parameters'] / 1e6:.1f} M parameters in {found['tensors']} "
        f"tensors, batch {found['batch']}, adamw{clipped}",
        f"compute of all ranks beside each other {bounds['compute']:.1f} ms, one all-reduce of all "
        f"gradients {bounds['reduction']:.1f} ms, "
        f"T* {bounds[best]:.1f} ms (chunks of {best.removeprefix('both_')} MiB)",
        "",
        *_table(systems, bounds[best]),
    ]
    for label, its in systems.items():
        if trace := its["rounds"][-1].get("trace"):
            lines += ["", f"an iteration of {label}, ms from the start of backward"]
            lines += trace_lines(trace)
    return lines


def _table(systems: Mapping[str, Any], optimum_ms: float) -> list[str]:
    times = {
        label: [turn["iteration_ms"] for turn in its["rounds"]] for label, its in systems.items()
    }
    medians = {label: statistics.median(chain(*rounds)) for label, rounds in times.items()}
    peers = [label for label in medians if not label.startswith("bytesched")]
    best = min(peers, key=medians.__getitem__, default="")
    plain = next((label for label in systems if label.startswith("ddp")), next(iter(systems)))
    rows = [["system", "iteration ms", "of T*", "speed", "95 %", "CPU ms", "peak MiB", "losses"]]
    for label, its in systems.items():
        speed = within = "-"
        if best:
            speed = f"{medians[best] / medians[label]:.3f}x"
        if best not in ("", label):
            within = "{:.3f}-{:.3f}".format(*interval(times[best], times[label]))
        took = f"{medians[label]:.2f}", f"{medians[label] / optimum_ms:.3f}x"
        cpu_ms = statistics.median(turn["cpu_ms"] for turn in its["rounds"])
        peak = max(turn["peak_bytes"] for turn in its["rounds"]) / _MIB
        losses = agreement(systems[plain]["losses"], its["losses"])
        rows.append([label, *took, speed, within, f"{cpu_ms:.1f}", f"{peak:.0f}", losses])
    return [
        *aligned(rows, "<>>>>>><"),
        "",
        "iteration: median. T*: all collectives and the compute of an iteration at once.",
        f"speed: how many times as fast as {best or 'the best other'}. CPU: of a rank's threads.",
        f"losses: with deterministic kernels, against those of {plain}.",
    ]


def interval(
    theirs: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Where the ratio of the medians lies, by samples of rounds and of the iterations in them.

    Both were measured in the same rounds, which are drawn in pairs.
    """
    draw = random.Random(0)
    ratios = []
    for _ in range(_DRAWS):
        turns = draw.choices(range(len(ours)), k=len(ours))
        one, other = (
            statistics.median(chain(*(draw.choices(side[t], k=len(side[t])) for t in turns)))
            for side in (theirs, ours)
        )
        ratios.append(one / other)
    ratios.sort()
    outside = round(_DRAWS * (1 - _HELD) / 2)
    return ratios[outside], ratios[-1 - outside]


def agreement(expected: Sequence[Sequence[float]], got: Sequence[Sequence[float]]) -> str:
    """Whether every rank has the same losses, or nearly."""
    if expected == got:
        return "same bits"
    pairs = zip(chain(*expected), chain(*got), strict=True)
    apart = [abs(one - other) / max(abs(one), 1e-12) for one, other in pairs]
    # Of what is no number, nothing is at most anything.
    is_close = all(each <= _CLOSE for each in apart)
    return f"within {max(apart):.0e}" if is_close else f"DIFFER by {max(apart):.0e}"


def trace_lines(trace: Mapping[str, Any]) -> list[str]:
    """The tables of an iteration: its passes, its chunks and its gates."""
    lines = [", ".join(f"{name} {ms:.1f}" for name, ms in trace["passes"])]
    for kind, head in (("chunks", "chunk sent arrived"), ("gates", "gate reached passed")):
        rows = [(name, *(f"{ms:.1f}" for ms in times)) for name, *times in trace[kind]]
        titles = head.split()
        lines += [*aligned([titles, *rows], "<" + ">" * (len(titles) - 1)), ""]
    return lines[:-1]
