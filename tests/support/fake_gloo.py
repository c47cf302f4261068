"""Gloo without connections: a test ends each operation, and says which ranks are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from bytesched.plugins.routes.group import Group
from bytesched.plugins.routes.store import Notes

CLOSED = "Connection closed by peer [127.0.0.1]:1234"
#: of every wait of a test; none is ever waited out
TIMEOUT_S = 100.0


class FakeWork:
    """An operation that ends when the test says so."""

    def __init__(self) -> None:
        self.waited_for = threading.Event()
        self._over = threading.Event()
        self._error: str | None = None

    def end(self, error: str | None = None) -> None:
        """It has ended, or failed with what Gloo says."""
        self._error = error
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waited_for.set()
        if not self._over.wait(TIMEOUT_S if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise RuntimeError(self._error)


class _LastReceive(FakeWork):
    """Of a message that never comes: when it times out, Gloo breaks all connections."""

    def __init__(self, abort: Callable[[], None]) -> None:
        super().__init__()
        self._abort = abort

    def wait(self, timeout: timedelta | None = None) -> None:
        self._abort()
        raise RuntimeError("Operation timed out!")


class FakeGloo:
    """What a Group needs of Gloo's backend."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        self._rank, self._size = rank, size
        #: whose connections are broken
        self.gone: set[int] = set()
        #: what was begun: its kind, its tensor, the other rank, and the work
        self.begun: list[tuple[str, torch.Tensor, int, FakeWork]] = []

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "gloo"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeWork:
        return self._begin("send", tensors[0], peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeWork:
        # As Group looks at connections, and breaks them.
        if tag == 1 << 20 and peer not in self.gone:
            return _LastReceive(self.abort)
        return self._begin("recv", tensors[0], peer)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> FakeWork:
        return self._begin("allreduce", tensors[0], -1)

    def works(self) -> list[FakeWork]:
        return [work for *_, work in self.begun]

    def abort(self) -> None:
        self.gone.update(range(self._size))
        for work in self.works():
            if not work.is_completed():
                work.end("Application timeout caused pair closure")

    def _begin(self, kind: str, tensor: torch.Tensor, peer: int) -> FakeWork:
        if peer in self.gone or (peer < 0 and self.gone):
            raise RuntimeError(CLOSED)
        work = FakeWork()
        self.begun.append((kind, tensor, peer, work))
        return work


def fake_group(gloo: Any, timeout_s: float = TIMEOUT_S, store: HashStore | None = None) -> Group:
    store = store or HashStore()
    return Group(gloo, store, Notes(store, gloo.rank()), name="s/data", timeout_s=timeout_s)
