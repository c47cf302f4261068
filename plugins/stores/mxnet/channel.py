"""Connections by which worker 0 sends its order of pushes to all others.

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
from bytesched.task import CommTask

__all__ = ["Channel"]

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
            with _Door(server, token) as door:
                deadline = monotonic() + self._timeout_s
                while (missing := self._num_workers - 1 - len(self._connections)) > 0:
                    if monotonic() >= deadline:
                        raise SchedulerTimeout(
                            f"waited {self._timeout_s:g} s for {missing} workers to connect to "
                            f"{(host, port)}",
                            rank=self._rank,
                        )
                    self._connections += door.admitted(deadline)
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


class _Door:
    """Takes connections side by side, so that one that sends nothing holds up no other."""

    def __init__(self, server: socket.socket, token: bytes) -> None:
        server.setblocking(False)
        self._server = server
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        #: what those that have not shown the token have sent, the oldest first
        self._strangers: dict[socket.socket, bytes] = {}

    def admitted(self, deadline: float) -> list[socket.socket]:
        """Connections that have just sent the token; none by then, or if others only came."""
        found = []
        for key, _ in self._selector.select(max(deadline - monotonic(), 0.0)):
            if key.fileobj is self._server:
                self._accept()
            elif (connection := key.fileobj) in self._strangers:
                assert isinstance(connection, socket.socket)
                if self._shows_token(connection):
                    found.append(connection)
        return found

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            # It was reset meanwhile.
            return
        connection.setblocking(False)
        if len(self._strangers) == _MOST_STRANGERS:
            self._refuse(next(iter(self._strangers)))
        self._strangers[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _shows_token(self, connection: socket.socket) -> bool:
        """Reads what has come; true if it is the whole token. Closes what sends another."""
        data = b""
        with contextlib.suppress(OSError):
            data = connection.recv(_TOKEN_BYTES - len(self._strangers[connection]))
        self._strangers[connection] += data
        shown = self._strangers[connection]
        if data and len(shown) < _TOKEN_BYTES:
            return False
        if not secrets.compare_digest(shown, self._token):
            self._refuse(connection)
            return False
        self._selector.unregister(connection)
        del self._strangers[connection]
        return True

    def _refuse(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._strangers[connection]
        connection.close()

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in list(self._strangers):
            self._refuse(connection)
        self._selector.close()


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
