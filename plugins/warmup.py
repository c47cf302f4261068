"""The first synchronised backward pass: reduced as a whole, and what is learned meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter, process_time
from typing import Any

import torch

from bytesched.config import Config
from bytesched.plugins.c10d import Group, Packer
from bytesched.plugins.plan import Plan, Slot
from bytesched.sizes import PROBE_WINDOW, Probe, chosen_sizes, probe_sizes

__all__ = ["WarmUp"]

_TASK = "the first iteration"

#: all-reduces per measurement, and measurements per size: the best one counts
_COUNT = 6
_TRIES = 2


class WarmUp:
    """Agrees on the order, measures the link, chooses sizes, builds the plan and reduces it.

    Everything here happens in the user's thread, in the same order on all ranks.
    """

    def __init__(
        self, group: Group, config: Config, slots: Sequence[Slot], *, cpu_load: float
    ) -> None:
        self._group = group
        self._config = config
        self._slots = slots
        self._device = slots[0].parameter.device
        # A model on a GPU does not compute on the cores that chunks cost time on.
        self._cpu_load = cpu_load if self._device.type == "cpu" else 0.0
        #: True if some parameter got no gradient on any rank
        self.unused = False
        self.partition_bytes = config.partition_bytes
        self.credit_bytes = config.credit_bytes
        #: for the chunks of the plan that ``reduce`` built
        self.packer: Packer
        #: what was measured, if sizes had to be chosen
        self.probes: list[Probe] = []

    def reduce(self, order: Sequence[int], *, find_unused: bool | None) -> Plan:
        """The plan, with all gradients averaged in its arenas; collective."""
        fired = self._sum([int(slot.used or slot.used_alone) for slot in self._slots])
        self.unused = any(count < self._group.size for count in fired)
        for slot, count in zip(self._slots, fired, strict=True):
            slot.grad = slot.parameter.grad
            slot.used = count > 0
            slot.used_alone = False
        agreed = self._from_leader(list(order))
        self._choose_sizes()
        plan = Plan(
            [self._slots[index] for index in agreed],
            partition_bytes=self.partition_bytes,
            find_unused=self.unused if find_unused is None else find_unused,
        )
        for slot in plan.slots:
            slot.sending = len(slot.chunks)
        self.packer = Packer(plan, self._group.size, self._config.compression)
        for chunk in plan.chunks:
            if chunk is not plan.flags_chunk:
                self._reduce(self.packer.pack(chunk))
                self.packer.receive(chunk)
                self.packer.let_go(chunk)
        # Gradients of another stream are let go of next, and must have been read by then.
        self._synchronize()
        return plan

    def _choose_sizes(self) -> None:
        if self.partition_bytes and self.credit_bytes:
            return
        if not self.partition_bytes:
            self.probes = probe_sizes(self._probe)
        sizes = chosen_sizes(
            self.probes,
            model_bytes=sum(s.parameter.numel() * s.parameter.element_size() for s in self._slots),
            cpu_load=self._cpu_load,
            partition_bytes=self.partition_bytes,
            credit_bytes=self.credit_bytes,
        )
        self.partition_bytes, self.credit_bytes = self._from_leader(list(sizes))

    def _probe(self, nbytes: int) -> Probe:
        """All-reduces of ``nbytes``, with the same answer on every rank."""
        cpu_s = process_time()
        best_s = min(self._timed(nbytes) for _ in range(_TRIES))
        cpu_s = (process_time() - cpu_s) / (_TRIES * _COUNT)
        bytes_per_s, cpu_ns = self._from_leader([int(_COUNT * nbytes / best_s), int(1e9 * cpu_s)])
        return Probe(nbytes, float(bytes_per_s), cpu_ns / 1e9)

    def _timed(self, nbytes: int) -> float:
        buffers = [torch.zeros(nbytes // 4, device=self._device) for _ in range(PROBE_WINDOW)]
        self._reduce(buffers[0][:1])
        self._synchronize()
        began = perf_counter()
        works: deque[Any] = deque()
        for index in range(_COUNT):
            if len(works) == PROBE_WINDOW:
                self._group.wait(works.popleft(), task=_TASK)
            buffer = buffers[index % PROBE_WINDOW]
            works.append(self._group.backend.allreduce([buffer]))
        while works:
            self._group.wait(works.popleft(), task=_TASK)
        self._synchronize()
        return perf_counter() - began

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _sum(self, values: list[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        self._reduce(tensor)
        return [int(value) for value in tensor.tolist()]

    def _from_leader(self, values: list[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        if self._group.rank:
            tensor.zero_()
        self._reduce(tensor)
        return [int(value) for value in tensor.tolist()]

    def _reduce(self, tensor: torch.Tensor) -> None:
        self._group.wait(self._group.backend.allreduce([tensor]), task=_TASK)
