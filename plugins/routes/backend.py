"""The seam between a session and its ranks: torch.distributed, a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from bytesched.errors import SchedulerTimeout
from bytesched.observe import Observers
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ..layout.packing import Packer
from ..layout.plan import Plan
from .carrier import Carrier
from .streams import Streams

__all__ = ["Backend", "from_leader"]


class Backend(Protocol):
    """The ranks that reduce together, and what they do it with."""

    rank: int
    size: int
    #: what gradients are divided by before they are sent, where sending does not average
    divisor: int
    #: the rule of its partitions and credit, of `link.sizes.RULES`
    sizes: str
    #: in which sums are made: 1, or 2 where ranks add up within their hosts first
    levels: int
    timeout_s: float
    #: "gloo", "nccl", ...
    wire: str
    #: what can change at run time, of `tunable.KNOBS`
    knobs: frozenset[str]
    #: whether an order is planned in the first rounds
    plans: bool

    def sum(self, tensor: torch.Tensor, key: str) -> Any:
        """Begins to sum ``tensor`` over the ranks, in place; returns what ``wait`` takes.

        ``key`` names what is summed. Two sums under way at once have different keys.
        """

    def reduce(self, chunk: CommTask, packed: torch.Tensor) -> Any:
        """Begins to reduce the gradients of ``chunk`` in place; returns what ``wait`` takes."""

    def wait(self, work: Any, *, task: str = "") -> None:
        """Waits for the end of ``work``, whose failure is an error of ours."""

    def carrier(
        self,
        plan: Plan,
        packer: Packer,
        streams: Streams,
        setting: Setting,
        *,
        reduced: Callable[[CommTask], None],
        failed: Callable[[BaseException], None],
        observers: Observers,
    ) -> Carrier:
        """What carries the chunks of ``plan`` from now on; collective, called once.

        Args:
            packer: packs them; each but that of flags has been packed and reduced once.
            streams: where they are packed and their ends awaited.
            setting: credit and policy; the plan is cut already.
            reduced: called when the sum of a chunk is in the arena.
            failed: called with the first error.
        """

    def timeout(self, message: str, story: Callable[[], str]) -> SchedulerTimeout:
        """The error of a wait that outlived its deadline, with the last events."""

    def leave_note(self, text: str) -> None:
        """Says why this rank stops, for the others to show beside their own error."""

    def abort(self) -> None:
        """What is under way ends in errors here and on the other ranks. Idempotent, any thread."""

    def close(self) -> None:
        """Lets go of everything; nothing must be under way."""


def from_leader(
    backend: Backend, values: Sequence[int], device: torch.device, key: str
) -> list[int]:
    """What rank 0 passed; collective, with as many values on all ranks.

    In the user's thread, while nothing else is under way.
    """
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    if backend.rank:
        tensor.zero_()
    backend.wait(backend.sum(tensor, key), task=key)
    return [int(value) for value in tensor.tolist()]
