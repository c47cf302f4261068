"""Between gradients and the wire: into the arena slice by slice, and into the wire's dtype."""

from __future__ import annotations

from typing import Final

import torch

from bytesched.task import CommTask

from .plan import Plan
from .slots import Slice

__all__ = ["Packer", "elements"]

#: ``None`` sends gradients as they are
WIRE_DTYPES: Final[dict[str, torch.dtype | None]] = {
    "none": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Packer:
    """Brings gradients into what is sent, and what was received into the arena.

    Gradients are divided while they are packed, as DDP does, or after rounding to the wire's
    dtype, as DDP's compression hooks do.

    Args:
        divisor: the world size, or 1 where sending averages.
        compression: the wire's dtype, a key of WIRE_DTYPES.
    """

    def __init__(self, plan: Plan, divisor: int, compression: str) -> None:
        self._plan = plan
        self._divisor = divisor
        self._scale = 1.0 / divisor
        self._dtype = WIRE_DTYPES[compression]
        self._wires: list[torch.Tensor | None] = []
        self.plan_cut()

    def plan_cut(self) -> None:
        """The plan has other chunks now."""
        dtype = self._dtype
        self._wires = [
            torch.empty_like(buffer, dtype=dtype)
            if dtype is not None and buffer.is_floating_point()
            else None
            for buffer in self._plan.buffers
        ]

    def memory(self, chunk: CommTask) -> torch.Tensor:
        """The tensor that ``pack`` fills, as it is."""
        wire = self._wires[chunk.index]
        return self._plan.buffers[chunk.index] if wire is None else wire

    def pack(self, chunk: CommTask) -> torch.Tensor:
        """The tensor to reduce for ``chunk``."""
        # In the thread that trains, modes of the script would see what they do not see under DDP.
        # Nothing here requires a gradient.
        with torch._C.DisableTorchFunction():
            return self._packed(chunk)

    def _packed(self, chunk: CommTask) -> torch.Tensor:
        wire = self._wires[chunk.index]
        for slice_ in self._plan.slices[chunk.index]:
            _pack(slice_, self._scale if wire is None else 1.0)
        buffer = self._plan.buffers[chunk.index]
        if wire is None:
            return buffer
        wire.copy_(buffer)
        return wire if self._divisor == 1 else wire.div_(self._divisor)

    def receive(self, chunk: CommTask) -> None:
        """Takes over what was received."""
        wire = self._wires[chunk.index]
        if wire is not None:
            self._plan.buffers[chunk.index].copy_(wire)

    def let_go(self, chunk: CommTask) -> None:
        """Local gradients live until their chunks are complete.

        Not less: on a GPU, packing them was only enqueued.
        """
        for slice_ in self._plan.slices[chunk.index]:
            slice_.grad = None


def _pack(slice_: Slice, scale: float) -> None:
    """Writes the slice's gradient, times ``scale``, to the arena; zeros if there is none."""
    slot, grad = slice_.slot, slice_.grad
    if grad is None:
        slice_.target.zero_()
        return
    if slice_.is_whole:
        torch.mul(grad, scale, out=slot.view)
        return
    part = elements(grad, slot.view, slice_.start_at, slice_.stop_at)
    torch.mul(part, scale, out=slice_.target)


def elements(tensor: torch.Tensor, like: torch.Tensor, start_at: int, stop_at: int) -> torch.Tensor:
    """Elements of ``tensor``, in the order that they have in memory in ``like``.

    ``like`` has the same shape and is dense. A view where strides are equal.
    """
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((stop_at - start_at,), (1,), tensor.storage_offset() + start_at)
