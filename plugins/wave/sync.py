"""Gradients sent once for every wave: what the paper does, and twice the bytes for two waves."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from bytesched.config import Config
from bytesched.core import SchedulerCore
from bytesched.plugins.agree import agree
from bytesched.plugins.c10d import open_group
from bytesched.plugins.c10d_peers import C10dPeers
from bytesched.plugins.ddp import broadcast, find_ddp
from bytesched.plugins.observing import observers_of
from bytesched.plugins.packing import Packer
from bytesched.plugins.plan import Plan, Slot
from bytesched.plugins.progress import Progress
from bytesched.plugins.streams import streams_for
from bytesched.plugins.wave.lanes import Lanes
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask

__all__ = ["PerWaveGradients"]

_PARTITION_BYTES: Final = 2**20
#: chunks in flight where the credit is to be chosen
_WINDOW: Final = 2

#: instances are numbered in the order of their making, which is the same on all ranks
_number = itertools.count()


class PerWaveGradients:
    """Each wave's gradients are averaged over the ranks as they arrive, then the waves are summed.

    Chunks of an earlier wave go first, and within a wave front layers first. The sum runs over
    ranks first, so it equals gradient accumulation up to rounding.

    Args:
        model: the module, whose parameters and buffers rank 0 gives to all unless it is a DDP.
        parameters: those that may get a gradient, the same on all ranks.
        config: sizes that are 0 become 1 MiB, and two chunks in flight.
    """

    last_is_whole = False

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        waves: int,
        lanes: Lanes,
        config: Config,
    ) -> None:
        self._parameters = parameters
        self._lanes = lanes
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._slots = [
            [Slot(f"wave {wave}: {names.get(id(p), 'of the loss')}", p) for p in parameters]
            for wave in range(waves)
        ]
        ddp = find_ddp(model)
        base = ddp.process_group if ddp is not None else dist.distributed_c10d._get_default_group()
        kind = base._get_backend(parameters[0].device).name()
        name = f"waves{next(_number)}"
        data = open_group(base, kind, name=f"{name}/data", timeout_s=config.timeout_s)
        control = open_group(base, "gloo", name=f"{name}/control", timeout_s=config.timeout_s)
        agree(
            [f"{s.name} {tuple(s.parameter.shape)} {s.parameter.dtype}" for s in self._all()],
            data.rank,
            data.gather_text,
        )
        if ddp is None:
            broadcast(data, model)
        self.observers = observers_of(control, config)
        self._plan = Plan(
            list(self._all()), partition_bytes=config.partition_bytes or _PARTITION_BYTES
        )
        self._peers = C10dPeers(data, control)
        self._progress = Progress(self._peers)
        self._streams = streams_for(parameters[0].device, self._progress.fail)
        packer = Packer(self._plan, self._peers.divisor, config.compression)
        self._agreement = self._peers.agreement(self._plan.chunks, config)
        credit_bytes = config.credit_bytes or _WINDOW * (config.partition_bytes or _PARTITION_BYTES)
        self._scheduler = Scheduler(
            SchedulerCore(
                self._agreement.queue(), credit_bytes=self._agreement.window_bytes(credit_bytes)
            ),
            self._peers.transport(packer, self._streams),
            announce=self._agreement.announce,
            on_finish=self._on_finish,
            on_error=self._progress.fail,
            observers=self.observers,
        )
        self._progress.story = self._scheduler.core.story
        self._agreement.bind(self._scheduler)
        #: a chunk may have gradients of two waves, which arrive in two threads
        self._lock = threading.Lock()
        self._closed = False

    def begin(self) -> None:
        self._progress.check()
        for slot in self._all():
            slot.fired = 0
            slot.sending = len(slot.chunks)
        self._progress.outstanding = len(self._plan.chunks)

    def arrived(self, wave: int, index: int, gradient: torch.Tensor) -> None:
        self._take(self._slots[wave][index], gradient)

    def ended(self, wave: int) -> None:
        for slot in self._slots[wave]:
            if not slot.fired:
                self._take(slot, None)

    def fail(self, error: BaseException) -> None:
        self._progress.fail(error)

    def finish(self) -> None:
        self._progress.wait(lambda: not self._progress.outstanding, "the gradients of all waves")
        for index, parameter in enumerate(self._parameters):
            first, *others = (slots[index].view for slots in self._slots)
            total = first.clone()
            for view in others:
                total += view
            parameter.grad = total

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._streams.close()
        self._scheduler.close()
        self._agreement.close()
        self._peers.close()

    def _all(self) -> itertools.chain[Slot]:
        return itertools.chain.from_iterable(self._slots)

    def _take(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        self._progress.check()
        slot.fired += 1
        slot.grad = gradient
        self._streams.gradient()
        with self._lock:
            for chunk in slot.chunks:
                if chunk.notify_ready():
                    self._streams.backward_done(chunk, self._computed)

    def _computed(self, chunk: CommTask) -> None:
        self._agreement.ready()
        self._scheduler.notify_ready(chunk)
        if self.observers:
            self.observers.on_flow("s", chunk.index, "backward", perf_counter_ns())

    def _on_finish(self, chunk: CommTask) -> None:
        """The scheduler's thread."""
        with self._progress.changed:
            if self._progress.outstanding == 1:
                self._agreement.round_ends()
            self._progress.outstanding -= 1
            self._progress.notify()
