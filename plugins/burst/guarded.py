"""A store that does not let a rank wait for one that has failed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch.distributed import distributed_c10d

from bytesched.errors import TransportError

from ..routes.groups.keys import await_keys

__all__ = ["GuardedStore"]


class GuardedStore(distributed_c10d.Store):
    """A store by which some ranks connect, which ends with the error that ``lost`` returns.

    Gloo waits in it for the address of every other rank, and cannot be interrupted.
    """

    def __init__(
        self,
        store: distributed_c10d.Store,
        lost: Callable[[], TransportError | None],
        *,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._store = store
        self._lost = lost
        self._timeout_s = timeout_s

    def set(self, key: str, value: str) -> None:
        """Sets ``key`` for all ranks."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """What was set, once it was."""
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all of them were set."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Returns when all of them were set; raises the error of ``lost``, or the store's own."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        await_keys(self._store, keys, timeout_s, self._lost)
