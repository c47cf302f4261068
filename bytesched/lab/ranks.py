"""The ranks of `bytesched bench`: started on emulated hosts, here, or as one of a launcher's."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bytesched.environment import RankView, gloo_interfaces, seen_variables
from bytesched.errors import BytesschedError
from bytesched.lab.hosts import Lab
from bytesched.lab.mpi import mpirun_command

WORKER = "bytesched.plugins.bench.worker"
POLL_S = 0.05
LOG_LINES = 30


class BenchError(BytesschedError):
    """A rank of the bench failed."""


def run_all(
    spec: dict[str, Any], hosts: int, rate: str | None, folder: Path, worker: str = WORKER
) -> str:
    """Run every rank, on emulated hosts if there is a rate, else here; describe the network.

    ``worker`` is the module that a rank runs; its argument is ``spec`` as JSON.
    """
    with Lab(hosts + (spec.get("servers") or 0), rate) as lab:
        if rate and not lab.shaped:
            print(
                f"no emulated hosts on this machine, links are not shaped: {lab.reason}",
                file=sys.stderr,
            )
        spec = spec | {
            "address": lab.addresses[0],
            "interface": lab.interface,
            "link_bytes_per_s": lab.rate_bits_per_s / 8 if lab.shaped else None,
        }
        if spec.get("controller") == "mpi" or spec.get("servers") is not None:
            spec["mpirun"] = mpirun_command(lab, folder)
        environment = {
            "WORLD_SIZE": str(hosts),
            "MASTER_ADDR": lab.addresses[0],
            "MASTER_PORT": str(lab.free_port()),
            "GLOO_SOCKET_IFNAME": lab.interface,
            "OMP_NUM_THREADS": str(spec["threads"] or 1),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        logs = [folder / f"rank{rank}.log" for rank in range(hosts)]
        processes = []
        for rank, log in enumerate(logs):
            node = f"host{rank}" if lab.shaped else socket.gethostname()
            with log.open("w") as stderr:
                processes.append(
                    lab.launch(
                        rank,
                        _worker(spec | {"node": node}, rank, worker),
                        environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stderr=stderr,
                    )
                )
        _wait(processes, logs)
        if lab.shaped:
            return f"links of {lab.rate_bits_per_s / 1e9:g} Gbit/s between emulated hosts"
        return "loopback"


def run_own(spec: dict[str, Any], view: RankView) -> str:
    """Run the one rank that the launcher started here."""
    spec = spec | {
        "address": seen_variables().get("MASTER_ADDR", "127.0.0.1"),
        "interface": next(iter(gloo_interfaces()), ""),
        "node": socket.gethostname(),
        "link_bytes_per_s": None,
    }
    with Lab(1, None) as lab:
        code = lab.launch(0, _worker(spec, view.rank)).wait()
    if code:
        raise BenchError(f"rank {view.rank} failed with exit code {code}; see above")
    return f"ranks started by {view.launcher}"


def _worker(spec: dict[str, Any], rank: int, worker: str = WORKER) -> list[str]:
    return [sys.executable, "-m", worker, json.dumps(spec | {"rank": rank})]


def _wait(processes: list[subprocess.Popen[str]], logs: list[Path]) -> None:
    """Return when every rank has ended well; raise `BenchError` when one has not."""
    while None in (codes := [process.poll() for process in processes]):
        if any(codes):
            break
        time.sleep(POLL_S)
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        tail = "\n".join(logs[failed[0]].read_text().rstrip().splitlines()[-LOG_LINES:])
        raise BenchError(f"rank {failed[0]} failed with exit code {codes[failed[0]]}:\n{tail}")
