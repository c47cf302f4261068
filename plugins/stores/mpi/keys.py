"""The keys of a worker: on which server each is, and how far it is in its step."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from bytesched.errors import InvalidTransition, MismatchError
from bytesched.kvstore.protocol import Key, describe

__all__ = ["Keys", "Remote"]


@dataclass(eq=False)
class Remote:
    """A key, and where it is."""

    key: Key
    number: int
    server: int
    what: str
    nbytes: int
    #: pushes of this worker
    count: int = 0
    #: pushed, and not pulled since
    is_pushed: bool = False
    _lock: Lock = field(default_factory=Lock)

    def begin_push(self, worker: int) -> int:
        """The number of this push of ``worker``, from 1; InvalidTransition for two in one step."""
        with self._lock:
            if self.is_pushed:
                raise InvalidTransition(
                    f"worker {worker} pushed key {self.key!r} twice in one step: pull it first"
                )
            self.is_pushed = True
            self.count += 1
            return self.count


class Keys:
    """All workers make the same calls, and so put each key on the same server.

    Args:
        servers: ranks.
    """

    def __init__(self, servers: list[int]) -> None:
        self._load_bytes = dict.fromkeys(servers, 0)
        self._remotes: dict[Key, Remote] = {}
        self._numbers = 0

    def place(self, key: Key, value: Any, nbytes: int) -> Remote:
        """Where a new key goes: to the server that holds the fewest bytes."""
        server = min(self._load_bytes, key=lambda rank: (self._load_bytes[rank], rank))
        self._load_bytes[server] += nbytes
        remote = Remote(key, self._numbers, server, describe(value), nbytes)
        self._numbers += 1
        return remote

    def add(self, remote: Remote) -> None:
        """It is on its server."""
        self._remotes[remote.key] = remote

    def remove(self, remote: Remote) -> None:
        """It is not used any more."""
        self._load_bytes[remote.server] -= remote.nbytes
        del self._remotes[remote.key]

    def known(self, key: Key, call: str, value: Any = None) -> Remote:
        """InvalidTransition for a key that is not there, MismatchError for a strange value."""
        remote = self._remotes.get(key)
        if remote is None:
            raise InvalidTransition(f"{call} of key {key!r}, which has not been initialised")
        if value is not None and describe(value) != remote.what:
            raise MismatchError(
                f"{call} of key {key!r} with {describe(value)}; it was initialised as {remote.what}"
            )
        return remote

    def __contains__(self, key: Key) -> bool:
        return key in self._remotes

    def __len__(self) -> int:
        return len(self._remotes)
