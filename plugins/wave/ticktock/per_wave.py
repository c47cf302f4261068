"""Gradients sent once for every wave: what the paper does, and twice the bytes for two waves."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from bytesched.config import Config
from bytesched.link.sizes import RULES
from bytesched.policy import named_policy
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ...c10d.carrying import broadcast
from ...c10d.ddp import find_ddp
from ...c10d.joining import joining
from ...dependency.progress import Progress
from ...layout.packing import Packer
from ...layout.plan import Plan
from ...layout.slots import Slot
from ...routes.group_backend import C10dBackend
from ...routes.groups.opening import kind_of
from ...routes.streams import streams_for
from ...warmup.agree import statements

__all__ = ["PerWaveGradients"]


#: instances are numbered in the order of their making, which is the same on all ranks
_number = itertools.count()


class PerWaveGradients:
    """Each wave's gradients are averaged over the ranks as they arrive, then the waves are summed.

    Chunks of an earlier wave go first, and within a wave front layers first. The sum runs over
    ranks first, so it equals gradient accumulation up to rounding. What no wave of any rank has
    used gets no gradient: which ranks have used what is summed as well, when all waves are over.

    Args:
        model: the module, whose parameters and buffers rank 0 gives to all unless it is a DDP.
        named: the parameters that may get a gradient, with their names, the same on all ranks.
        config: sizes that are 0 become 1 MiB, and two chunks in flight.
    """

    last_is_whole = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, nn.Parameter]],
        waves: int,
        config: Config,
    ) -> None:
        # Before the first group: an unknown name would leave it open.
        named_policy(config.policy)
        self._parameters = [parameter for _, parameter in named]
        self._slots = [
            [Slot(f"wave {wave}: {name}", parameter) for name, parameter in named]
            for wave in range(waves)
        ]
        device = self._parameters[0].device
        ddp = find_ddp(model)
        base = ddp.process_group if ddp is not None else dist.distributed_c10d._get_default_group()
        kind = kind_of(base, device)
        with joining(base, f"waves{next(_number)}", config) as ranks:
            data, control = ranks.open("data", kind), ranks.open("control")
            ranks.agree(statements([*self._all()], optimizer, config))
            if ddp is None:
                broadcast(data, model)
            self.observers = ranks.observers()
        sizes = RULES["waves"].sizes(config.partition_bytes, config.credit_bytes)
        partition_bytes, credit_bytes = sizes
        self._plan = Plan(list(self._all()), partition_bytes=partition_bytes, find_unused=True)
        self._backend = C10dBackend(data, control)
        self._progress = Progress(self._backend)
        self._under_way = self._progress.round.under_way
        self._streams = streams_for(device, self._progress.fail)
        self._carrier = self._backend.carrier(
            self._plan,
            Packer(self._plan, self._backend.divisor, config.compression),
            self._streams,
            Setting(partition_bytes, credit_bytes, config.policy, config.order),
            reduced=self._reduced,
            failed=self._progress.fail,
            observers=self.observers,
        )
        self._progress.story = self._carrier.story
        #: a chunk may have gradients of two waves, which arrive in two threads
        self._lock = threading.Lock()
        self._waves_left = 0
        self._closed = False

    def begin(self) -> None:
        self._progress.check()
        for slot in self._all():
            slot.fired = 0
        with self._progress.lock:
            self._under_way.begin(self._plan.chunks)
        self._waves_left = len(self._slots)

    def arrived(self, wave: int, index: int, gradient: torch.Tensor) -> None:
        self._take(self._slots[wave][index], gradient)

    def ended(self, wave: int) -> None:
        used = [bool(slot.fired) for slot in self._slots[wave]]
        for slot, is_used in zip(self._slots[wave], used, strict=True):
            if not is_used:
                self._take(slot, None)
        flags, chunk = self._plan.used_flags, self._plan.flags_chunk
        assert flags is not None
        assert chunk is not None
        first = wave * len(used)
        with self._lock:
            flags[first : first + len(used)] = torch.tensor(used, dtype=flags.dtype)
            self._waves_left -= 1
            if not self._waves_left and chunk.notify_ready():
                self._streams.backward_done(chunk, self._carrier.submit)

    def fail(self, error: BaseException) -> None:
        self._progress.fail(error)

    def finish(self) -> None:
        self._progress.wait(lambda: self._under_way.is_empty, "the gradients of all waves")
        assert self._plan.used_flags is not None
        used = self._plan.used_flags.view(len(self._slots), -1).T.tolist()
        for index, (parameter, ranks) in enumerate(zip(self._parameters, used, strict=True)):
            views = [slots[index].view for slots, n in zip(self._slots, ranks, strict=True) if n]
            parameter.grad = views[0].clone() if views else None
            for view in views[1:]:
                assert parameter.grad is not None
                parameter.grad += view

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._streams.close()
        self._carrier.close()
        self._backend.close()

    def _all(self) -> itertools.chain[Slot]:
        return itertools.chain.from_iterable(self._slots)

    def _take(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        self._progress.check()
        slot.fired += 1
        slot.give(gradient)
        self._streams.gradient()
        with self._lock:
            for chunk in slot.chunks:
                if chunk.notify_ready():
                    self._streams.backward_done(chunk, self._carrier.submit)

    def _reduced(self, chunk: CommTask) -> None:
        """A thread of the carrier."""
        with self._progress.lock:
            self._under_way.summed(chunk)
            self._progress.notify()
