"""One order on all ranks of torch.distributed, planned of what all have measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bytesched.course import MEASURED_ROUNDS, Course, Say
from bytesched.link.planned import Measured, planned_order
from bytesched.order import Following
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask
from bytesched.tunable import Setting

from .group import Group

__all__ = ["PlannedOrder"]

#: what fails if ranks cannot tell each other
_PLAN = "the order of chunks"


class PlannedOrder:
    """Every rank keeps to the order of the course (see scheduled.Ordering).

    Args:
        group: the control group; only this uses it beside the user's thread.
        chunks: those of a round.
    """

    order = "planned"

    def __init__(self, group: Group, chunks: Sequence[CommTask], setting: Setting) -> None:
        self._group = group
        self._scheduler: Scheduler
        #: of the scheduler, when the last round ended
        self._busy_ns = 0
        #: what the ranks tell each other: the largest numbers of all, and the work
        self._telling: tuple[torch.Tensor, Any] | None = None
        #: what all have measured: rates, and of each tensor when it is ready at the latest
        self._rates: list[int] = []
        self._ready_ns: dict[str, int] = {}
        self._begin(chunks, setting)

    def queue(self) -> Following:
        return Following()

    def window_bytes(self, credit_bytes: int) -> int:
        return credit_bytes

    def bind(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        scheduler.ordered(self._course.order)

    def round_ends(self) -> None:
        self._measure()
        heard = self._heard()
        say = self._course.round_ends(heard)
        if say is Say.NUMBERS:
            self._tell(self._measured.numbers())
        elif say is Say.PLAN:
            self._note(heard)
            self._tell(self._plan())
        self._scheduler.ordered(self._course.order)

    def change(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        self._heard()
        self._begin(chunks, setting)
        if self._rates:
            # Nothing is under way, and all ranks are here.
            self._tell(self._plan())
            self._course.follow(self._heard())
        self._busy_ns = self._scheduler.busy_ns
        # The order of the next round is still in the old queue.
        self._scheduler.use_queue(self.queue())
        self._scheduler.ordered(self._course.order)

    def close(self) -> None:
        if self._telling is not None:
            (_, work), self._telling = self._telling, None
            # The others begin it at the end of the same round, whatever their scripts do.
            self._group.wait_left([work])

    def _begin(self, chunks: Sequence[CommTask], setting: Setting) -> None:
        self._chunks = tuple(chunks)
        self._setting = setting
        self._course = Course(len(chunks))
        self._measured = Measured()

    def _measure(self) -> None:
        scheduler = self._scheduler
        self._measured.round_ends(
            [scheduler.ready_at_ns[index] for index in range(len(self._chunks))],
            nbytes=sum(chunk.nbytes for chunk in self._chunks),
            busy_ns=scheduler.busy_ns - self._busy_ns,
        )
        self._busy_ns = scheduler.busy_ns

    def _note(self, numbers: Sequence[int]) -> None:
        """What all have measured of these chunks holds for others of the same tensors."""
        self._rates = list(numbers[:MEASURED_ROUNDS])
        self._ready_ns = {}
        for chunk, ready_ns in zip(self._chunks, numbers[MEASURED_ROUNDS:], strict=True):
            for member in chunk.members:
                known_ns = self._ready_ns.get(member.name, ready_ns)
                self._ready_ns[member.name] = min(ready_ns, known_ns)

    def _plan(self) -> list[int]:
        """What this rank says of the order: on all but rank 0 nothing, less than any index."""
        if self._group.rank:
            return [-1] * len(self._chunks)
        ready_ns = [
            max(self._ready_ns[member.name] for member in chunk.members) for chunk in self._chunks
        ]
        return planned_order(
            [chunk.nbytes for chunk in self._chunks],
            [*self._rates, *ready_ns],
            policy=self._setting.policy,
            credit_bytes=self._setting.credit_bytes,
        )

    def _tell(self, numbers: Sequence[int]) -> None:
        """Collective: begins to find the largest of all ranks' numbers, for `_heard`."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        try:
            work = self._group.largest(tensor)
        except RuntimeError as error:
            raise self._group.error(error, task=_PLAN) from error
        self._telling = tensor, work

    def _heard(self) -> list[int]:
        if self._telling is None:
            return []
        (tensor, work), self._telling = self._telling, None
        self._group.wait(work, task=_PLAN)
        return [int(number) for number in tensor.tolist()]
