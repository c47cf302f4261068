"""The seam between a session and what carries its gradients: torch.distributed or Horovod."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from bytesched.config import Config
from bytesched.errors import SchedulerTimeout
from bytesched.order import ReadyQueue
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.session.streams import Streams
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask
from bytesched.transport import Transport
from bytesched.tunable import Setting

__all__ = ["Agreement", "Peers", "from_leader"]


class Agreement(Protocol):
    """How the ranks come to send chunks in one order."""

    @property
    def order(self) -> str:
        """The way of agreeing at the moment, for ``stats()``."""

    def queue(self) -> ReadyQueue:
        """What chooses among the ready chunks of this rank."""

    def window_bytes(self, credit_bytes: int) -> int:
        """The credit of this rank, where the session's is ``credit_bytes``."""

    def bind(self, scheduler: Scheduler) -> None:
        """``scheduler`` is to keep the order; called once, before any chunk is ready."""

    def ready(self) -> None:
        """One more chunk is ready here; its scheduler hears of it next."""

    def announce(self, chunks: Sequence[CommTask]) -> None:
        """These start now, in this order. The scheduler's thread."""

    def round_ends(self) -> None:
        """The last chunk of a round is reduced. The scheduler's thread."""

    def change(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        """There are other chunks, or another policy or order; between the same two rounds on all
        ranks, when nothing is under way.
        """

    def close(self) -> None:
        """Stops what runs beside the scheduler."""


class Peers(Protocol):
    """The ranks that reduce together, and what they do it with."""

    rank: int
    size: int
    #: what gradients are divided by before they are sent, where sending does not average
    divisor: int
    #: whether the link is busy while the next operation is prepared
    hides_overhead: bool
    timeout_s: float
    #: what carries: "gloo", "nccl", "horovod", ...
    backend: str
    #: what can change at run time, of `tunable.KNOBS`
    knobs: frozenset[str]
    #: orders that are replayed when they have settled, of `tunable.ORDERS`
    replayed: frozenset[str]

    def sum(self, tensor: torch.Tensor, key: str) -> Any:
        """Begins to sum ``tensor`` over the ranks, in place; returns what ``wait`` takes.

        ``key`` names what is summed. Two sums under way at once have different keys.
        """

    def reduce(self, chunk: CommTask, packed: torch.Tensor) -> Any:
        """Begins to reduce the gradients of ``chunk`` in place; returns what ``wait`` takes."""

    def wait(self, work: Any, *, task: str = "") -> None:
        """Waits for the end of ``work``, whose failure is an error of ours."""

    def transport(self, packer: Packer, streams: Streams) -> Transport:
        """What sends the chunks of ``packer``'s plan."""

    def agreement(self, chunks: Sequence[CommTask], config: Config) -> Agreement:
        """How the order of ``chunks`` is agreed."""

    def timeout(self, message: str, story: Callable[[], str]) -> SchedulerTimeout:
        """The error of a wait that outlived its deadline, with what the scheduler knows."""

    def leave_note(self, text: str) -> None:
        """Says why this rank stops, for the others to show beside their own error."""

    def abort(self) -> None:
        """What is under way ends in errors here and on the other ranks. Idempotent, any thread."""

    def close(self) -> None:
        """Lets go of everything; nothing must be under way."""


def from_leader(peers: Peers, values: Sequence[int], device: torch.device, key: str) -> list[int]:
    """What rank 0 passed; collective, with as many values on all ranks.

    In the user's thread, while nothing else is under way.
    """
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    if peers.rank:
        tensor.zero_()
    peers.wait(peers.sum(tensor, key), task=key)
    return [int(value) for value in tensor.tolist()]
