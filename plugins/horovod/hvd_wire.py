"""Horovod as the wire of a session: its all-reduce, its controller, its errors."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from ctypes import c_float
from typing import Any, Final
from zlib import crc32

import horovod.torch as hvd
import torch

from bytesched.environment import horovod_cache_capacity
from bytesched.errors import TransportError

from ..ending import end_soon, is_at_the_end
from ..planned.clocks import PROBE
from ..planned.source import Source
from ..planned.wire import HOST
from ..routes.probing import BEFORE_PROBES
from .operations import Operations, Work

log = logging.getLogger("bytesched")

#: the key of what ranks tell each other; nothing else of it is told meanwhile
_NUMBERS: Final = "numbers"

#: Scale factors that chunks differ by: single precision does not see so many steps of double.
_FACTORS: Final = 1 << 22
#: Powers of two that double precision is scaled by.
_POWERS: Final = 512

#: between two tries to give up what is under way
_END_NAP_S: Final = 0.01

#: Horovod's refusal of a name that was announced and is not reduced yet
_NAME_IN_USE: Final = "with the same name as another tensor"


class HorovodWire(Operations):
    """The ranks of a process set (see `bytesched.plugins.planned.wire.Wire`).

    Horovod runs an operation when every rank has announced it, whatever their order. Among those
    that it finds announced together, and remembers, it takes first what it ran longest ago
    (controller.cc, ComputeResponseList), and fuses what has the same scale factors (FuseResponses).
    So a chunk has a factor of its own, which depends on all chunks that were announced before it in
    the round. What stands elsewhere than in the last round is negotiated anew, in the order in
    which ranks announce it, behind what does not: chunks always run in that order.

    Args:
        average: whether gradients are averaged, or summed.
        predivide: what averaged gradients are divided by before the sum.
        name: of the session, the same on all ranks, unique in this job.
        device: where gradients are.
        dtype: of all chunks; None: each has that of its gradients.
    """

    #: Horovod has no event for them
    sees_ends = False
    levels = 1

    def __init__(
        self,
        process_set: hvd.ProcessSet,
        *,
        average: bool,
        predivide: float,
        name: str,
        timeout_s: float,
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(process_set, name=name, timeout_s=timeout_s)
        self.has_streams = device.type == "cuda"
        self._device = device
        self._dtype = dtype
        self._op = hvd.Average if average else hvd.Sum
        self._scale = (1.0 / predivide, predivide) if average else (1.0, 1.0)
        self._divisor = self.size if average else 1
        self._source: Source
        #: the current round, and what stands for all that was announced in it
        self._round = -1
        self._announced_keys = 0
        self._has_given_up = False

    def follow(self, source: Source) -> None:
        """Chunks are those of ``source``, the same on all ranks."""
        self._source = source
        chunks = sum(len(bucket.chunks) for bucket in source.buckets)
        capacity = horovod_cache_capacity()
        if self.rank == 0 and 0 <= capacity < chunks:
            log.warning(
                "HOROVOD_CACHE_CAPACITY = %d is less than %d chunks: Horovod negotiates them anew "
                "in every step, which takes long, and may change their order; set it to %d or more",
                capacity,
                chunks,
                2 * chunks,
            )

    # -- sums --------------------------------------------------------------------------

    def start(self, tensor: torch.Tensor, key: str = "") -> Work:
        if self._round != self._source.finished:
            self._round, self._announced_keys = self._source.finished, 0
            self._held.let_go()
        self._announced_keys = crc32(key.encode(), self._announced_keys)
        index = self._announced_keys % _FACTORS
        scale = _unfused(index, tensor.dtype, self._scale, self._divisor)
        return self.allreduce(tensor, key, self._op, scale)

    def start_largest(self, numbers: torch.Tensor) -> Work:
        """See `Wire`. A rank that has joined tells zeros: what is compared differs then."""
        return self.allreduce(numbers, _NUMBERS, hvd.Max)

    def wait_left(self, works: Iterable[Any]) -> None:
        """See `Wire`. Horovod holds what it has, and calls nobody when it ends."""

    def stream(self) -> int:
        if not self.has_streams:
            return HOST
        handle: int = torch._C._cuda_getCurrentRawStream(self._device.index)
        return handle

    def of_leader(self, number: int) -> int:
        """Rank 0's ``number``, on all ranks; collective."""
        numbers = torch.tensor([number if self.rank == 0 else 0], device="cpu")
        self.wait(self.allreduce(numbers, "clock", hvd.Sum), "comparing clocks")
        return int(numbers)

    # -- the end -----------------------------------------------------------------------

    def leave_note(self, text: str) -> None:
        log.error("rank %d gives up: %s", self.rank, text)

    def abort(self) -> None:
        """See `Wire`.

        Horovod itself is not ours to stop. But announcing a chunk in a shape that no other rank
        has makes it an error on every rank, as soon as all have announced it.
        """
        if self._has_given_up:
            return
        self._has_given_up = True
        dtypes = {_NUMBERS: torch.float64, PROBE: torch.float32, BEFORE_PROBES: torch.float32}
        for bucket in tuple(self._source.buckets):
            # Where it was never sent, it has the dtype of its gradients yet.
            dtypes |= {chunk.key: self._dtype or chunk.sent.dtype for chunk in tuple(bucket.chunks)}
        ends = {
            key: torch.empty(1, 1, self.rank + 1, dtype=dtype, device="cpu")
            for key, dtype in dtypes.items()
        }

        def announce() -> bool:
            """Those whose names are under way stay, until they no longer are."""
            for key in tuple(ends):
                if not self._is_under_way(key, ends[key]):
                    del ends[key]
            return not ends

        def announce_rest() -> None:
            deadline_s = time.monotonic() + self.timeout_s
            # In a process that is ending, the others hear of that.
            while not (is_at_the_end() or time.monotonic() > deadline_s or announce()):
                time.sleep(_END_NAP_S)

        if not announce() and not is_at_the_end():
            end_soon(announce_rest, 0.0)

    def _is_under_way(self, key: str, end: torch.Tensor) -> bool:
        """Announces ``end`` under ``key``, unless that is the name of what is under way."""
        try:
            self.allreduce(end, key, hvd.Sum)
        except TransportError as error:
            # The other reason is that Horovod was shut down.
            return _NAME_IN_USE in str(error)
        return False

    def close(self) -> None:
        """See `Wire`: there is nothing of its own to let go of."""


def _unfused(
    index: int, dtype: torch.dtype, scale: tuple[float, float], divisor: int
) -> tuple[float, float]:
    """``scale``, before and after the sum, in a form that no other index has; the same result.

    ``divisor`` is what Horovod divides by in the end.
    """
    before, after = scale
    if dtype is torch.float64:
        power = 2.0 ** (index % _POWERS - _POWERS // 2)
        return before / power, after * power
    # Narrower types are scaled in single precision, which does not see this. Two steps, because
    # dividing may bring neighbours together.
    other = after + 2 * index * math.ulp(after)
    same = c_float(other / divisor).value == c_float(after / divisor).value
    return before, other if same else after
