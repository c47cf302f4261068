"""torch.distributed as the backend of a session: process groups of our own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from bytesched.errors import SchedulerTimeout
from bytesched.observe import Observers
from bytesched.scheduler import InTurn
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ..layout.packing import Packer
from ..layout.plan import Plan
from .carrier import Carrier
from .groups.group import Group
from .groups.group_transport import C10dTransport
from .groups.rank_order import PlannedOrder
from .levels.sums import TwoLevelSums
from .scheduled import ScheduledCarrier
from .streams import Streams

__all__ = ["C10dBackend"]

log = logging.getLogger("bytesched")


class C10dBackend:
    """The ranks of a process group (see backend.Backend).

    Args:
        data: the group that gradients travel on.
        control: the group on which ranks agree on an order.
        buffers: the group that buffers travel on, if there are any.
        levels: what sums gradients in place of ``data``, if something does.
    """

    knobs = frozenset({"partition_bytes", "credit_bytes", "policy"})
    plans = True
    sizes = "all-reduce"

    def __init__(
        self,
        data: Group,
        control: Group,
        buffers: Group | None = None,
        levels: TwoLevelSums | None = None,
    ) -> None:
        self.rank = data.rank
        self.size = self.divisor = data.size
        self.timeout_s = data.timeout_s
        self.wire: str = data.backend.name()
        self._data = data
        self._control = control
        self.levels = 1 if levels is None else 2
        self._levels = levels
        self._groups = [data, control] if buffers is None else [data, control, buffers]
        self._groups += [] if levels is None else levels.groups
        #: the last sum that Gloo or NCCL does at once
        self._summing: Any = None

    def sum(self, tensor: torch.Tensor, key: str) -> Any:
        if self._levels is None or not tensor.is_floating_point():
            self._summing = self._data.all_reduce(tensor)
            return self._summing
        return self._levels.start(tensor)

    def reduce(self, chunk: CommTask, packed: torch.Tensor) -> Any:
        return self.sum(packed, chunk.name)

    def wait(self, work: Any, *, task: str = "") -> None:
        self._data.wait(work, task=task)

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
        return ScheduledCarrier(
            plan.chunks,
            C10dTransport(self._data, packer, streams, self._levels),
            PlannedOrder(self._control, plan.chunks, setting),
            credit_bytes=setting.credit_bytes,
            reduced=reduced,
            failed=failed,
            observers=observers,
            # A chunk's end, the next one's start and the updates that follow are one wake-up.
            events=InTurn(),
        )

    def timeout(self, message: str, story: Callable[[], str]) -> SchedulerTimeout:
        return SchedulerTimeout(
            message + self._data.note(), rank=self.rank, story=story().splitlines()
        )

    def leave_note(self, text: str) -> None:
        self._data.leave_note(text)

    def abort(self) -> None:
        for group in self._groups:
            try:
                group.abort()
            except Exception:
                log.exception("%s could not be broken", group.name)

    def close(self) -> None:
        summing, self._summing = self._summing, None
        if summing is not None:
            # All ranks that have reduced the last round take part in it, busy as they may be.
            self._data.wait_left([summing])
            if not summing.is_completed():
                # A connection that waits for them does not end.
                self.abort()
        del summing
        if self._levels is not None:
            self._levels.close()
        for group in self._groups:
            group.close()
