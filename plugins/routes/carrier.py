"""The seam between a running session and what carries its chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bytesched.task import CommTask
from bytesched.tunable import Setting

__all__ = ["Carrier", "Traffic"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What has been carried since the start."""

    #: time in which something was on the wire
    busy_ns: int = 0
    chunks: int = 0
    nbytes: int = 0
    #: CPU time of choosing what is next
    cpu_ns: int = 0


class Carrier(Protocol):
    """Takes the chunks of one plan in every round, and reports each as reduced.

    It is made when the first round has been reduced, with two callbacks: ``reduced(chunk)``, when
    the sum lies in the arena and the chunk waits for gradients again; and ``failed(error)``, once.
    Both are called on threads of the carrier.
    """

    @property
    def order(self) -> str:
        """How the ranks come to one order at the moment, for ``stats()``."""

    @property
    def traffic(self) -> Traffic:
        """What has been carried so far."""

    def submit(self, chunk: CommTask) -> None:
        """All gradients of ``chunk``, which is READY, are there. On one thread."""

    def change(self, setting: Setting) -> None:
        """The plan has been cut for ``setting``; between the same two rounds on all ranks."""

    def story(self) -> str:
        """The last events, for the message of an error."""

    def close(self) -> None:
        """Ends what is under way, and its threads. Idempotent."""
