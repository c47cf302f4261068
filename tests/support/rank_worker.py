"""The ranks of a test, forked from a server that has already imported torch.

`python rank_worker.py FD MODULE...` is the server: it imports the modules, starts ranks, and
reports their exit codes over the connection FD. Importing torch takes seconds and forking
milliseconds; a forked rank unwinds to the end of this file, so that it ends like any interpreter:
with its atexit functions run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

LOOPBACK = "127.0.0.1"
#: as the interpreter found it
IMPORT_PATH = sys.path[1:]
#: what a training imports: by the server, so that its ranks need not
OURS = ("bytesched", "bytesched.plugins.c10d.ddp")
_signals: Signals | None = None


@dataclass(frozen=True)
class Launch:
    """What a rank is told at its start; `address` is where a pooled rank fetches its cases.

    With a `world_size` of 0 the process is no rank: it has no process group and no signals.
    """

    world_size: int = 0
    store_port: int = 0
    #: of a rank of Horovod, its launcher's to say
    rank: int = -1
    timeout_s: float = 100.0
    output: str = ""
    import_path: list[str] = field(default_factory=lambda: list(sys.path))
    environment: dict[str, str] = field(default_factory=dict)
    #: Horovod's own variables, for a rank of Horovod instead of a process group
    horovod: dict[str, str] = field(default_factory=dict)
    address: str = ""
    case: tuple[str, str] = ("", "")
    args: tuple[Any, ...] = ()


class Signals:
    """Named events shared by the ranks of one case, beside any process group."""

    def __init__(self, launch: Launch) -> None:
        timeout = timedelta(seconds=launch.timeout_s)
        # A blocked wait holds its client, so setting has one of its own.
        self._setting, self._waiting = (
            TCPStore(LOOPBACK, launch.store_port, is_master=False, timeout=timeout)
            for _ in range(2)
        )
        self.case_name = "signals"

    def set(self, name: str) -> None:
        self._setting.set(f"{self.case_name}/{name}", "1")

    def wait(self, name: str) -> None:
        """Return when some rank has set `name`. Raises `DistStoreError` after `timeout_s`."""
        self._waiting.wait([f"{self.case_name}/{name}"])


def signals() -> Signals:
    """The events of the running case."""
    assert _signals is not None, "only a case run on ranks has signals"
    return _signals


def die_at(name: str) -> None:
    """Kill this process when some rank sets `name`."""
    waiting = signals()

    def wait() -> None:
        waiting.wait(name)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def gloo_threads() -> int:
    """How many threads the groups of this process have, over Gloo: one or two each."""
    found = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += path.read_text().strip() == "pt_gloo_runloop"
    # A thread that has just begun has no name yet, and torch's own groups have two.
    return max(found, 2 * len(distributed_c10d._world.pg_map))


def gloo_threads_left(before: int) -> int:
    """How many there are more than `before`, when those that end have had the time to.

    Those of an earlier case may end meanwhile.
    """
    deadline = time.monotonic() + 10.0
    while (left := gloo_threads() - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    return max(left, 0)


def dump(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def resolve(case: tuple[str, str]) -> Any:
    """The function `case` = (file, name), imported under the file's own name."""
    file, name = case
    folder = str(Path(file).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.import_module(Path(file).stem)
    assert module.__file__ == file, f"{module.__file__} has the name of {file}"
    return getattr(module, name)


def serve(connection: Connection) -> Launch | None:
    """Start ranks until the other side hangs up. Returns in a forked rank with what it shall do."""
    children: set[int] = set()
    while True:
        try:
            verb, argument = connection.recv()
        except EOFError:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return None
        if verb == "start":
            pid = os.fork()
            if pid == 0:
                connection.close()
                return load(argument)  # type: ignore[no-any-return]
            children.add(pid)
            connection.send(pid)
        else:
            pid, status = os.waitpid(argument, os.WNOHANG)
            if pid:
                children.discard(pid)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)


def enter(launch: Launch) -> None:
    """Become the rank `launch` describes: output, environment, default process group or Horovod."""
    for stream, descriptor in (("out", 1), ("err", 2)):
        target = os.open(f"{launch.output}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, descriptor)
        os.close(target)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    sys.path[:] = launch.import_path
    torch.set_num_threads(1)
    if not launch.world_size:
        return
    os.environ.update(GLOO_SOCKET_IFNAME="lo", **launch.environment)
    if launch.horovod:
        os.environ.update(launch.horovod)
        importlib.import_module("horovod.torch").init()
        return
    os.environ.update(
        RANK=str(launch.rank),
        LOCAL_RANK=str(launch.rank),
        WORLD_SIZE=str(launch.world_size),
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(launch.store_port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    dist.init_process_group("gloo", timeout=timedelta(seconds=launch.timeout_s))


def serve_cases(launch: Launch) -> None:
    """Run the cases that arrive until the other side hangs up."""
    global _signals
    _signals = Signals(launch)
    with Client(launch.address, family="AF_UNIX") as connection:
        connection.send((launch.rank, os.getpid()))
        while True:
            try:
                number, case, args = load(connection.recv_bytes())
            except EOFError:
                return
            _signals.case_name = f"signals {number}"
            try:
                outcome = (True, resolve(case)(*args))
            except Exception:  # noqa: BLE001 (the other side raises it)
                outcome = (False, traceback.format_exc())
            end_exchanges()
            destroy_groups()
            connection.send_bytes(dump(outcome))


def end_exchanges() -> None:
    """Ends those of the group that outlives a case, whose thread the next case would find."""
    if (peers := sys.modules.get("bytesched.plugins.exchanges.peers")) is not None:
        for layers in tuple(peers._LAYERS.values()):
            if layers.peers is not None:
                layers.end.detach()
                layers.peers.close()
                layers.peers = None


def destroy_groups() -> None:
    """Ends the groups that a case has made, whose threads wake up a hundred times a second."""
    for group in tuple(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def spare_what_is_imported() -> None:
    """Have what is forked from here end without freeing torch's objects, and copying their pages.

    What a process has imported or made itself is freed as ever.
    """
    # Nor is it looked at.
    gc.collect()
    gc.freeze()
    imported = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "__main__"}
    }
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(imported))
    for finalizer in tuple(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False

    def forget() -> None:
        for name in imported:
            sys.modules.pop(name, None)

    atexit.register(forget)


def main() -> None:
    sys.modules["rank_worker"] = sys.modules["__main__"]
    # Imported by the first optimizer step, and by every compiled case.
    for module in ("torch._dynamo", "pytest", *sys.argv[2:]):
        importlib.import_module(module)
    spare_what_is_imported()
    for module in OURS:
        importlib.import_module(module)
    # How fast this machine is makes no difference to a test, and takes a second to measure well.
    probing = sys.modules["bytesched.plugins.routes.probing"]
    vars(probing).update(_TRIES=1, _SHORT_TRIES=1)
    launch = serve(Connection(int(sys.argv[1])))
    if launch is None:
        return
    enter(launch)
    if launch.address:
        serve_cases(launch)
        if not launch.horovod:
            dist.destroy_process_group()
        return
    global _signals
    if launch.world_size:
        _signals = Signals(launch)
    resolve(launch.case)(*launch.args)


if __name__ == "__main__":
    main()
