"""The order of pushes: worker 0 sends it to all others, who follow it.

A server answers when every worker has pushed a chunk. Workers that choose for themselves send
different chunks, because their windows open at different moments: what one has sent early another
one sends last. MXNet has no messages between workers, so there are connections for that.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
from collections.abc import Callable, Sequence
from threading import Thread
from time import monotonic

from bytesched.environment import mxnet_hosts
from bytesched.errors import PeerLost, SchedulerTimeout
from bytesched.order import Following
from bytesched.task import CommTask

_INDEX = struct.Struct("<I")
#: Any process may connect; one that sends this is a worker.
_TOKEN_BYTES = 16
#: Connections that have not sent it yet; the oldest one is closed for another.
_MOST_STRANGERS = 256


class Channel:
    """Connections from worker 0 to each other worker.

    A worker that is gone is no error here: the servers then answer nothing, which has a deadline.

    Args:
        received: called, on a thread of its own, with the indices that worker 0 has sent.
        timeout_s: for connecting, and for sending.
    """

    def __init__(
        self,
        rank: int,
        num_workers: int,
        received: Callable[[Sequence[int]], None],
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._num_workers = num_workers
        self._received = received
        self._timeout_s = timeout_s
        self._connections: list[socket.socket] = []
        self._receiver = Thread(target=self._receive, name="bytesched-order", daemon=True)

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
            self._receiver.start()
            return
        token = secrets.token_bytes(_TOKEN_BYTES)
        # A worker beyond them would be kept out for a second or more.
        backlog = self._num_workers + _MOST_STRANGERS
        with socket.create_server((_own_host(), 0), backlog=backlog) as server:
            host, port = server.getsockname()
            published(f"{host} {port} {token.hex()}")
            missing = self._num_workers - 1
            self._connections = _admitted(server, token, missing, monotonic() + self._timeout_s)
        if missing := missing - len(self._connections):
            raise SchedulerTimeout(
                f"waited {self._timeout_s:g} s for {missing} workers to connect to {(host, port)}",
                rank=self._rank,
            )
        for connection in self._connections:
            connection.settimeout(self._timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, tasks: Sequence[CommTask]) -> None:
        """Sends to all others what starts now."""
        message = b"".join(_INDEX.pack(task.index) for task in tasks)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sendall(message)

    def close(self) -> None:
        """Ends the connections. Idempotent."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            if self._receiver.is_alive():
                # A thread that is left at exit keeps MXNet's store alive, which then never ends.
                self._receiver.join(5.0)
            connection.close()

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

    def _receive(self) -> None:
        (connection,) = self._connections
        rest = b""
        with contextlib.suppress(OSError):
            while data := connection.recv(4096):
                data = rest + data
                whole = len(data) - len(data) % _INDEX.size
                rest = data[whole:]
                self._received([index for (index,) in _INDEX.iter_unpack(data[:whole])])


class Announced(Following):
    """The order that worker 0 has announced; what is not ready is passed over."""

    def pop(self) -> CommTask | None:
        if (task := self.peek()) is not None:
            self._order.remove(task.index)
            del self._ready[task.index]
        return task

    def peek(self) -> CommTask | None:
        return next((self._ready[i] for i in self._order if i in self._ready), None)


def _admitted(
    server: socket.socket, token: bytes, wanted: int, deadline: float
) -> list[socket.socket]:
    """So many connections that have sent the token; fewer if no others come by then.

    They are taken side by side, so that one that sends nothing holds up no other.
    """
    found: list[socket.socket] = []
    #: what those that have not shown the token have sent, the oldest first
    strangers: dict[socket.socket, bytes] = {}
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)

        def let_go(connection: socket.socket) -> bytes:
            selector.unregister(connection)
            return strangers.pop(connection)

        def accept() -> None:
            # It may have been reset meanwhile.
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                connection.setblocking(False)
                if len(strangers) == _MOST_STRANGERS:
                    let_go(oldest := next(iter(strangers)))
                    oldest.close()
                strangers[connection] = b""
                selector.register(connection, selectors.EVENT_READ)

        def read(connection: socket.socket) -> None:
            data = b""
            with contextlib.suppress(OSError):
                data = connection.recv(_TOKEN_BYTES - len(strangers[connection]))
            strangers[connection] += data
            if data and len(strangers[connection]) < _TOKEN_BYTES:
                return
            if secrets.compare_digest(let_go(connection), token):
                found.append(connection)
            else:
                connection.close()

        while len(found) < wanted and (left_s := deadline - monotonic()) > 0:
            for key, _ in selector.select(left_s):
                if key.fileobj is server:
                    accept()
                elif key.fileobj in strangers:
                    read(key.fileobj)
    for connection in strangers:
        connection.close()
    return found


def _own_host() -> str:
    """Where the others reach this worker: as MXNet was configured, or as the scheduler sees it."""
    own, scheduler = mxnet_hosts()
    if own:
        return own
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: it only looks up the route.
        probe.connect((scheduler, 1))
        host: str = probe.getsockname()[0]
        return host
