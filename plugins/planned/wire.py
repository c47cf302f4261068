"""What carries chunks: started in one order on all ranks, and waited for at gates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from ..routes.group import Group
from ..routes.levels import TwoLevelSums

#: where there are no streams
HOST: Final = -1


class Summing(Protocol):
    """Sums over some ranks."""

    def start(self, tensor: torch.Tensor, key: str = "") -> Any:
        """Begins to sum ``tensor`` over the ranks, in place; returns the work.

        Args:
            key: names it, as `Sent.key` does, where a wire pairs sums by name.
        """

    def wait(self, work: Any, task: str) -> None:
        """What the calling thread does from now on, or queues, comes after the end of ``work``.

        Raises `TransportError` with the name ``task``.
        """


class Wire(Summing, Protocol):
    """Sums over all ranks, and what they say to each other."""

    rank: int
    size: int
    timeout_s: float
    #: 2: hosts sum first
    levels: int
    #: a wait is only queued, on a stream of a device
    has_streams: bool
    #: ``work.get_future()`` calls the host at the end of a sum; else a wait shows that it has ended
    sees_ends: bool

    def start_largest(self, numbers: torch.Tensor) -> Any:
        """Begins to make ``numbers``, on the host, the largest of all ranks; returns the work."""

    def wait_left(self, works: Iterable[Any]) -> None:
        """Returns when ``works`` have ended, or cannot, or after a while; raises nothing."""

    def stream(self) -> int:
        """The stream on which the calling thread queues kernels."""

    def leave_note(self, text: str) -> None:
        """Says why this rank stops, for the others to show beside their own error."""

    def abort(self) -> None:
        """What is under way ends in errors here and on the other ranks. Idempotent, any thread."""

    def close(self) -> None:
        """Lets go of everything; nothing must be under way."""


class Exchanging(Wire, Protocol):
    """A wire on which ranks send each other parts, too."""

    def exchange(self, into: torch.Tensor, sent: torch.Tensor) -> Any:
        """Begins to send ``sent`` to the other of two ranks, and to take its; returns the work.

        On the host alone.
        """

    def all_to_all(
        self,
        into: torch.Tensor,
        sent: torch.Tensor,
        into_numels: Sequence[int],
        sent_numels: Sequence[int],
    ) -> Any:
        """Begins to send each rank so much of ``sent``, and to take as much; returns the work."""


class GroupWire:
    """Process groups of our own.

    Args:
        data: what sums travel on.
        control: of Gloo, what numbers of the host travel on; the same, if that is of Gloo.
        others: what is closed with them.
        device: where gradients are.
        sums: in two levels, in place of those on ``data``.
    """

    def __init__(
        self,
        data: Group,
        control: Group,
        others: Sequence[Group],
        device: torch.device,
        sums: TwoLevelSums | None = None,
    ) -> None:
        self.rank = data.rank
        self.size = data.size
        self.timeout_s = data.timeout_s
        self.has_streams = device.type == "cuda"
        self.sees_ends = not self.has_streams
        self.levels = 1 if sums is None else 2
        parts = () if sums is None else sums.groups
        self._groups = [*dict.fromkeys((data, control, *others, *parts))]
        self._device = device
        self.start: Callable[..., Any] = data.all_reduce if sums is None else sums.start
        self.exchange = data.exchange
        self.all_to_all = data.all_to_all
        self.start_largest = control.largest
        self.wait = data.wait
        self.wait_left = data.wait_left
        self.leave_note = data.leave_note

    def stream(self) -> int:
        if self._device.type != "cuda":
            return HOST
        handle: int = torch._C._cuda_getCurrentRawStream(self._device.index)
        return handle

    def abort(self) -> None:
        for group in self._groups:
            group.abort()

    def close(self) -> None:
        for group in self._groups:
            group.close()


class LoneWire:
    """This rank alone: its sums are there at once."""

    def start(self, tensor: torch.Tensor, key: str = "") -> Any:
        return _Ended(torch.cuda.current_stream().record_event() if tensor.is_cuda else None)

    def wait(self, work: Any, task: str) -> None:
        work.wait()


class _Ended:
    """The work of a sum that is there.

    Args:
        event: on a device, where it is; None: on the host.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self, timeout: object = None) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


@dataclass(frozen=True, eq=False)
class Partition:
    """A division of all ranks into groups, each of which sums its gradients alone.

    All ranks have the same ones in the same order, but groups of their own.
    """

    #: the ranks of the group that this rank is in
    members: tuple[int, ...]
    #: of that group among all of the partition
    place: int
    #: how many there are
    groups: int
    #: what sums over that group
    wire: Summing
