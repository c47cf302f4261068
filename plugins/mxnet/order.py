"""One order of pushes on all workers: worker 0 chooses, and tells the others.

A server answers when every worker has pushed a piece. Workers that choose for themselves send
different pieces, because their windows open at different moments: what one has sent early another
one sends last. MXNet has no messages between workers, so there are connections for that.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from threading import Thread
from time import monotonic

from bytesched.environment import mxnet_hosts
from bytesched.errors import PeerLost, SchedulerTimeout
from bytesched.task import CommTask

__all__ = ["Orders", "Told"]

_INDEX = struct.Struct("<I")
#: Anybody may connect; who knows this is a worker.
_TOKEN_BYTES = 16
#: for somebody who has connected to say it
_PATIENCE_S = 5.0


class Told:
    """Ready tasks in the order that was told; one that is not ready here holds up no other."""

    def __init__(self) -> None:
        self._told: list[int] = []
        self._ready: dict[int, CommTask] = {}

    def add(self, task: CommTask) -> None:
        self._ready[task.index] = task

    def pop(self) -> CommTask | None:
        for place, index in enumerate(self._told):
            if index in self._ready:
                del self._told[place]
                return self._ready.pop(index)
        return None

    def extend(self, indices: Sequence[int]) -> None:
        self._told += indices

    def tasks(self) -> Iterable[CommTask]:
        return self._ready.values()

    def __len__(self) -> int:
        return len(self._ready)


class Orders:
    """Connections from worker 0 to each other worker.

    A worker that is gone is no error here: the servers then answer nothing, which has a deadline.

    Args:
        heard: called, on a thread of ours, with the indices that worker 0 has told.
        timeout_s: for connecting, and for telling.
    """

    def __init__(
        self, rank: int, num_workers: int, heard: Callable[[Sequence[int]], None], timeout_s: float
    ) -> None:
        self._rank = rank
        self._num_workers = num_workers
        self._heard = heard
        self._timeout_s = timeout_s
        self._connections: list[socket.socket] = []
        self._hearing = Thread(target=self._hear, name="bytesched-order", daemon=True)

    def open(self, published: Callable[[str], str]) -> None:
        """Connects the workers, each of which calls it.

        ``published`` returns, on every worker, the text that it is given on worker 0.
        SchedulerTimeout at worker 0 if not all of the others come, PeerLost if they cannot.
        """
        if self._num_workers == 1:
            return
        if self._rank:
            host, port, secret = published("").split()
            connection = self._connected(host, int(port), bytes.fromhex(secret))
            self._connections.append(connection)
            self._hearing.start()
            return
        token = secrets.token_bytes(_TOKEN_BYTES)
        with socket.create_server((_own_host(), 0), backlog=self._num_workers) as server:
            host, port = server.getsockname()
            published(f"{host} {port} {token.hex()}")
            self._accept(server, token)

    def tell(self, tasks: Sequence[CommTask]) -> None:
        """What starts now, to all others."""
        message = b"".join(_INDEX.pack(task.index) for task in tasks)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sendall(message)

    def close(self) -> None:
        """Ends the connections. Idempotent."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            if self._hearing.is_alive():
                # A thread that is left at exit keeps MXNet's store alive, which then never ends.
                self._hearing.join(5.0)
            connection.close()

    def _accept(self, server: socket.socket, token: bytes) -> None:
        deadline = monotonic() + self._timeout_s
        while (missing := self._num_workers - 1 - len(self._connections)) > 0:
            try:
                server.settimeout(max(deadline - monotonic(), 0.001))
                connection, _ = server.accept()
            except TimeoutError:
                raise SchedulerTimeout(
                    f"waited {self._timeout_s:g} s for {missing} workers to connect to "
                    f"{server.getsockname()}",
                    rank=self._rank,
                ) from None
            said = b""
            with contextlib.suppress(OSError):
                connection.settimeout(_PATIENCE_S)
                said = connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
            if not secrets.compare_digest(said, token):
                connection.close()
                continue
            connection.settimeout(self._timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append(connection)

    def _connected(self, host: str, port: int, token: bytes) -> socket.socket:
        try:
            connection = socket.create_connection((host, port), self._timeout_s)
            connection.sendall(token)
        except OSError as error:
            raise PeerLost(
                f"worker 0 cannot be reached at {host}:{port}: {error}", rank=self._rank
            ) from error
        connection.settimeout(None)
        return connection

    def _hear(self) -> None:
        (connection,) = self._connections
        rest = b""
        with contextlib.suppress(OSError):
            while data := connection.recv(4096):
                data = rest + data
                whole = len(data) - len(data) % _INDEX.size
                rest = data[whole:]
                self._heard([index for (index,) in _INDEX.iter_unpack(data[:whole])])


def _own_host() -> str:
    """Where the others reach this worker: as MXNet was told, or as the scheduler sees it."""
    own, scheduler = mxnet_hosts()
    if own:
        return own
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: it only looks up the route.
        probe.connect((scheduler, 1))
        host: str = probe.getsockname()[0]
        return host
