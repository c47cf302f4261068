"""The first synchronised backward pass: reduced as a whole, and what is learned meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch

from bytesched.config import Config
from bytesched.plugins.c10d import Group, Packer
from bytesched.plugins.plan import Plan, Slot
from bytesched.sizes import Link, chosen_sizes

__all__ = ["WarmUp"]


class WarmUp:
    """Agrees on the order, measures the link, chooses sizes, builds the plan and reduces it.

    Everything here happens in the user's thread, in the same order on all ranks.
    """

    def __init__(self, group: Group, config: Config, slots: Sequence[Slot]) -> None:
        self._group = group
        self._config = config
        self._slots = slots
        self._device = slots[0].parameter.device
        #: True if some parameter got no gradient on any rank
        self.unused = False
        self.partition_bytes = config.partition_bytes
        self.credit_bytes = config.credit_bytes
        #: for the chunks of the plan that ``reduce`` built
        self.packer: Packer
        self.link = Link(overhead_s=math.nan, bytes_per_s=math.nan)

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
            slot.unpacked = len(slot.chunks)
        self.packer = Packer(plan, self._group.size, self._config.compression)
        for chunk in plan.chunks:
            if chunk is not plan.flags_chunk:
                self._reduce(self.packer.pack(chunk))
                self.packer.unpack(chunk)
        return plan

    def _choose_sizes(self) -> None:
        if self.partition_bytes and self.credit_bytes:
            return
        self.link = self._measure()
        model_bytes = sum(s.parameter.numel() * s.parameter.element_size() for s in self._slots)
        sizes = chosen_sizes(
            self.link,
            model_bytes=model_bytes,
            partition_bytes=self.partition_bytes,
            credit_bytes=self.credit_bytes,
        )
        self.partition_bytes, self.credit_bytes = self._from_leader(list(sizes))

    def _measure(self) -> Link:
        """Start-up time and bandwidth of an all-reduce, from a few of two sizes."""
        small, large = 4096, 2 * 2**20
        times = {}
        for nbytes in (small, large):
            buffer = torch.zeros(nbytes // 4, device=self._device)
            times[nbytes] = median(self._timed(buffer) for _ in range(3 if nbytes < large else 2))
        per_byte = max((times[large] - times[small]) / (large - small), 1e-12)
        return Link(overhead_s=times[small], bytes_per_s=1 / per_byte)

    def _timed(self, buffer: torch.Tensor) -> float:
        began = perf_counter()
        self._reduce(buffer)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        return perf_counter() - began

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
        self._group.wait(self._group.backend.allreduce([tensor]), task="the first iteration")
