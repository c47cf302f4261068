"""Runs a module-level function on several ranks: in a pool that lives on, or in fresh processes."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, Listener, Pipe, wait
from pathlib import Path
from typing import Any, TypeVar

from rank_worker import LOOPBACK, Launch, dump, load
from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")
# What a rank gets to end by itself once another one has failed.
GRACE_S = 5.0
#: what ranks of Horovod are forked with
HOROVOD = ("horovod.torch",)
# A store looks up the name of every address that connects: a slow resolver shall not slow tests.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


class RankFailure(Exception):
    """A rank raised, died or ran out of time; the message holds its traceback or output."""


@dataclass(frozen=True)
class ExitedRank:
    """How a fresh process ended: `code` is negative for a signal, -9 also when it ran too long."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class ForkServer:
    """The other side of `rank_worker.serve`, which has imported `modules`."""

    def __init__(self, *modules: str) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, str(Path(__file__).with_name("rank_worker.py"))]
        self._process = subprocess.Popen(
            [*command, str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()
        atexit.register(self.close)

    def close(self) -> None:
        """Hangs up: the server ends its ranks and then itself."""
        self._connection.close()
        self._process.wait(timeout=20)

    def start(self, launch: Launch) -> int:
        self._connection.send(("start", dump(launch)))
        return int(self._connection.recv())

    def poll(self, pid: int) -> int | None:
        """The exit code of a rank, None while it runs; to be asked once after the end."""
        self._connection.send(("poll", pid))
        code: int | None = self._connection.recv()
        return code

    def end(self, pids: Mapping[int, int]) -> None:
        """Kill the ranks (rank -> process id) that still run, and reap them."""
        for pid in pids.values():
            if self.poll(pid) is None:
                os.kill(pid, signal.SIGKILL)
                while self.poll(pid) is None:
                    time.sleep(0.01)


@cache
def fork_server(*modules: str) -> ForkServer:
    """The one such server of this test session; it ends when the session's process does."""
    return ForkServer(*modules)


def new_store() -> TCPStore:
    """A rendezvous that outlives every rank, as an elastic agent's does."""
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


def address_of(case: Callable[..., object]) -> tuple[str, str]:
    return inspect.getfile(inspect.unwrap(case)), case.__name__


class Ranks:
    """A pool of `world_size` processes that run one case after the other.

    The processes and their default process group serve all cases until one fails; then they are
    killed, and the next case finds new ones.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._case_numbers = itertools.count()
        self._pids: dict[int, int] = {}
        self._connections: dict[int, Connection] = {}
        self._store: TCPStore | None = None

    def run(self, case: Callable[..., T], *args: object, timeout_s: float = 150.0) -> list[T]:
        """What `case(*args)` returned on each rank. Raises `RankFailure` if it did not on one."""
        # Between cases ranks are stopped: threads of Gloo and Horovod are never idle.
        self._signal(signal.SIGCONT)
        if not self._connections:
            self._start()
        request = dump((next(self._case_numbers), address_of(case), args))
        for connection in self._connections.values():
            connection.send_bytes(request)
        returned, failed = self._collect(timeout_s)
        self._signal(signal.SIGSTOP)
        if failed:
            self._kill()
            report = "\n".join(
                f"--- rank {rank}\n{story}" for rank, story in sorted(failed.items())
            )
            raise RankFailure(f"{case.__name__}{args}\n{report}")
        return [returned[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        self._kill()
        self._folder.cleanup()

    def _signal(self, number: int) -> None:
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _server(self) -> ForkServer:
        return fork_server()

    def _horovod(self, rank: int) -> dict[str, str]:
        """Horovod's variables for a rank; it is one of a process group if there are none."""
        return {}

    def _kill(self) -> None:
        self._server().end(self._pids)
        for connection in self._connections.values():
            connection.close()
        self._pids, self._connections = {}, {}

    def _start(self) -> None:
        self._store = new_store()
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        address = str(folder / "cases")
        with Listener(address, family="AF_UNIX") as listener:
            for rank in range(self.world_size):
                launch = Launch(
                    rank=rank,
                    world_size=self.world_size,
                    store_port=self._store.port,
                    output=str(folder / f"rank{rank}"),
                    horovod=self._horovod(rank),
                    address=address,
                )
                self._pids[rank] = self._server().start(launch)
            for _ in range(self.world_size):
                connection = listener.accept()
                rank, _ = connection.recv()
                self._connections[rank] = connection
        self._output = folder

    def _collect(self, timeout_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        returned: dict[int, Any] = {}
        failed: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        waiting = {connection: rank for rank, connection in self._connections.items()}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failed |= {rank: self._why_stuck(rank) for rank in waiting.values()}
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    ok, value = load(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    ok, value = False, f"died\n{self._stderr(rank)}"
                (returned if ok else failed)[rank] = value
                if not ok:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return returned, failed

    def _why_stuck(self, rank: int) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(0.3)
        return f"did not come back; its threads were at\n{self._stderr(rank)}"

    def _stderr(self, rank: int) -> str:
        return (self._output / f"rank{rank}.err").read_text(errors="replace")[-6000:]


class Fresh:
    """Processes that each run `case(*args)` as a script would.

    The default process group exists when the case begins (with `timeout_s` of its own) and is the
    case's to destroy; with Horovod's variables of each rank, in `horovod`, Horovod has begun
    instead. `FRESH_FOLDER` names a folder that they share.
    """

    def __init__(
        self,
        case: Callable[..., object],
        world_size: int = 2,
        timeout_s: float = 30.0,
        env: Callable[[int], Mapping[str, str]] = lambda rank: {},
        args: tuple[object, ...] = (),
        horovod: Sequence[dict[str, str]] = (),
    ) -> None:
        self._server, self._store = fork_server(*HOROVOD[: len(horovod)]), new_store()
        self._folder = tempfile.TemporaryDirectory(prefix="fresh-")
        self.folder = Path(self._folder.name)
        self._began = time.monotonic()
        self._ended: dict[int, tuple[int, float]] = {}
        self.hung: set[int] = set()
        self.running = {
            rank: self._server.start(
                Launch(
                    rank=rank,
                    world_size=world_size,
                    store_port=self._store.port,
                    timeout_s=timeout_s,
                    output=f"{self.folder}/rank{rank}",
                    environment={"FRESH_FOLDER": str(self.folder), **env(rank)},
                    horovod=horovod[rank] if horovod else {},
                    case=address_of(case),
                    args=args,
                )
            )
            for rank in range(world_size)
        }

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def poll(self) -> bool:
        """True once every rank has ended."""
        for rank, pid in list(self.running.items()):
            if (code := self._server.poll(pid)) is not None:
                del self.running[rank]
                self._ended[rank] = code, self.seconds
        return not self.running

    def end_hung(self) -> None:
        """Kills what still runs, its stacks in `stderr`."""
        for pid in self.running.values():
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGUSR1)
        if self.running:
            time.sleep(0.3)
        self.hung |= self.running.keys()
        self._ended |= dict.fromkeys(self.running, (-signal.SIGKILL, self.seconds))
        self._server.end(self.running)
        self.running = {}

    def ends(self) -> list[ExitedRank]:
        return [
            ExitedRank(code, self._said(rank, "out"), self._said(rank, "err"), seconds)
            for rank, (code, seconds) in sorted(self._ended.items())
        ]

    def _said(self, rank: int, stream: str) -> str:
        return (self.folder / f"rank{rank}.{stream}").read_text(errors="replace")

    def close(self) -> None:
        """Ends what still runs; its files are gone afterwards."""
        self._server.end(self.running)
        self._folder.cleanup()


def run_fresh(
    case: Callable[..., object],
    world_size: int = 2,
    timeout_s: float = 150.0,
    env: Mapping[str, str] | None = None,
    args: tuple[object, ...] = (),
    horovod: Sequence[dict[str, str]] = (),
) -> list[ExitedRank]:
    """How fresh processes ended; after `timeout_s` seconds what still runs is killed."""
    with contextlib.closing(
        Fresh(case, world_size, env=lambda rank: env or {}, args=args, horovod=horovod)
    ) as fresh:
        while not fresh.poll() and fresh.seconds < timeout_s:
            time.sleep(0.01)
        fresh.end_hung()
        return fresh.ends()
