"""Chunks through sums in two levels."""

from __future__ import annotations

from bytesched.errors import BytesschedError, TransportError
from bytesched.task import CommTask
from bytesched.transport import Done

from ...layout.packing import Packer
from ...proxies.spans import span
from .sums import TwoLevelSums

__all__ = ["TwoLevelTransport"]


class TwoLevelTransport:
    """Packs a chunk, sums it in two levels, and reports when it is complete."""

    def __init__(self, sums: TwoLevelSums, packer: Packer) -> None:
        self._sums = sums
        self._packer = packer

    def start(self, task: CommTask, done: Done) -> None:
        def ended(error: BytesschedError | None) -> None:
            try:
                if error is None:
                    self._packer.receive(task)
                    self._packer.let_go(task)
            except RuntimeError as raised:
                error = TransportError(f"a received sum could not be unpacked: {raised}")
            done(task, error)

        with span("bytesched::send"):
            self._sums.begin(self._packer.pack(task), task.name, ended)

    def close(self) -> None:
        self._sums.close()

    def __repr__(self) -> str:
        return f"<TwoLevelTransport {self._sums!r}>"
