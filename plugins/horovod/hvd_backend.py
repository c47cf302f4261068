"""Horovod as the backend of a session: its all-reduce, its negotiation, its errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

from bytesched.errors import SchedulerTimeout
from bytesched.observe import Observers
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ..layout.packing import Packer
from ..layout.plan import Plan
from ..routes.carrier import Carrier
from ..routes.scheduled import ScheduledCarrier
from ..routes.streams import Streams
from ..warmup.first_round import WARM_UP
from ..warmup.retuning import DECISION
from .hvd_order import NegotiatedOrder
from .hvd_transport import HorovodTransport
from .wire import HorovodTimeout, Wire

__all__ = ["HorovodBackend"]

log = logging.getLogger("bytesched")


class HorovodBackend:
    """The ranks of a process set (see backend.Backend).

    Args:
        tuned: rank 0 sends decisions between two steps.
        others: of the Wire.
    """

    #: sending averages
    divisor = 1
    #: its one thread negotiates what is next when it has reduced what was ready
    sizes = "negotiated"
    levels = 1
    wire = "horovod"
    knobs = frozenset({"partition_bytes", "credit_bytes", "policy"})
    plans = False

    def __init__(
        self,
        process_set: hvd.ProcessSet,
        *,
        average: bool,
        predivide: float,
        name: str,
        timeout_s: float,
        tuned: bool = False,
    ) -> None:
        self._wire = Wire(
            process_set, average=average, predivide=predivide, name=name, timeout_s=timeout_s
        )
        self.rank = self._wire.rank
        self.size = self._wire.size
        self.timeout_s = timeout_s
        self._tuned = tuned
        #: whether other ranks may wait for gradients of this one; its session knows
        self.is_inside_round: Callable[[], bool] = lambda: False
        #: of the sums that other ranks may wait for
        self._keys = [WARM_UP]

    def sum(self, tensor: torch.Tensor, key: str) -> int:
        return self._wire.sum(tensor, key)

    def reduce(self, chunk: CommTask, packed: torch.Tensor) -> int:
        return self._wire.reduce(chunk, packed)

    def wait(self, work: Any, *, task: str = "") -> Any:
        return self._wire.wait(work, task=task)

    def is_done(self, work: int) -> bool:
        """True if ``wait`` would not."""
        return self._wire.is_done(work)

    def gather_text(self, key: str, text: str) -> list[str]:
        """Every rank's ``text``, by rank; collective."""
        return self._wire.gather_text(key, text)

    def clock_offset_ns(self) -> int:
        """What must be added to this host's wall clock to read rank 0's; collective."""
        for _ in range(3):
            # The last one ends at nearly the same moment everywhere.
            self.wait(self.sum(torch.zeros(1, device="cpu"), "clock"), task="comparing clocks")
        mine_ns = time.time_ns()
        leaders = torch.tensor([mine_ns if self.rank == 0 else 0], device="cpu")
        self.wait(self.sum(leaders, "clock of rank 0"), task="comparing clocks")
        return int(leaders.item()) - mine_ns

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
        self._wire.let_go()
        self._wire.expect(plan.chunks, lambda chunk: packer.memory(chunk).dtype)
        self._keys = [DECISION] if self._tuned else []
        return ScheduledCarrier(
            plan.chunks,
            HorovodTransport(self._wire, packer, streams),
            NegotiatedOrder(self._wire, packer, plan.chunks, setting),
            credit_bytes=setting.credit_bytes,
            reduced=reduced,
            failed=failed,
            observers=observers,
        )

    def timeout(self, message: str, story: Callable[[], str]) -> SchedulerTimeout:
        return HorovodTimeout(message, rank=self.rank, story=story().splitlines())

    def leave_note(self, text: str) -> None:
        log.error("rank %d gives up: %s", self.rank, text)

    def abort(self) -> None:
        self._wire.give_up(self._keys)

    def close(self) -> None:
        if self.is_inside_round():
            log.warning(
                "rank %d unwraps inside a backward pass: the others, which wait for its gradients, "
                "fail",
                self.rank,
            )
            self.abort()
