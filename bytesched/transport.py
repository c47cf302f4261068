"""The transport seam: what moves a task's bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bytesched.task import CommTask

__all__ = ["Done", "Transport"]

#: Called once per started task, from any thread, with the error that ended it, if one did.
Done = Callable[[CommTask, BaseException | None], None]


class Transport(Protocol):
    """Two methods. Calls of ``start`` follow one another, from one thread or from several."""

    def start(self, task: CommTask, done: Done) -> None:
        """Begins to send ``task``, in call order, and returns without waiting for the peer.

        ``done`` is called exactly once, also when it fails. An exception raised here counts as
        the failure of ``task``; ``done`` is then not called.
        """

    def close(self) -> None:
        """Releases everything; tasks in flight fail. Idempotent."""
