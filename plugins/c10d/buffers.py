"""DDP's broadcast of buffers, on a group of our own: its failures have a name and a deadline."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from bytesched.errors import TransportError
from bytesched.urgency import urgent

from ..routes.groups.group import Group

__all__ = ["BufferBroadcast", "broadcasts_buffers"]


class BufferBroadcast:
    """Called by DDP before a forward pass, in place of its own broadcast from rank 0.

    On the user's group a stopped peer would hold the forward pass for that group's timeout, and
    the error would be torch's. A copy of the model, or a saved one, has DDP's broadcast again.

    Args:
        group: of Gloo, what the buffers travel on; None in a copy. Those of a GPU pass through
            the host: a second communicator of NCCL beside that of the gradients could block both.
        raise_first: called with an error; raises it, or what has brought it about.
    """

    def __init__(
        self,
        group: Group | None = None,
        raise_first: Callable[[BaseException], NoReturn] | None = None,
    ) -> None:
        self._group = group
        self._raise_first = raise_first

    def take_over(self, ddp: DistributedDataParallel) -> Callable[[], None]:
        """Makes ``ddp`` call this; returns what undoes it."""
        ddp._register_buffer_comm_hook(ddp, self, _BufferCommHookLocation.PRE_FORWARD)
        return partial(_give_back, weakref.ref(ddp))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, ddp: DistributedDataParallel, buffers: dict[str, torch.Tensor]) -> None:
        if self._group is None or self._raise_first is None:
            ddp._default_broadcast_coalesced()
            return
        try:
            with urgent("buffers"):
                self._broadcast(self._group, list(buffers.values()))
        except TransportError as error:
            self._raise_first(error)

    def _broadcast(self, group: Group, buffers: list[torch.Tensor]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in buffers:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer.detach())
        options: Any = dist.BroadcastOptions()
        options.rootRank = 0
        sent = []
        for (dtype, _), tensors in kinds.items():
            if group.rank == 0:
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
            else:
                # What it holds is of no interest: no device is waited for.
                numel = sum(tensor.numel() for tensor in tensors)
                flat = torch.empty(numel, dtype=dtype, device="cpu")
            sent.append((group.backend.broadcast([flat], options), flat, tensors))
        for work, flat, tensors in sent:
            group.wait(work, task="the broadcast of buffers")
            parts = flat.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def __reduce__(self) -> Any:
        return BufferBroadcast, ()


def broadcasts_buffers(ddp: DistributedDataParallel) -> bool:
    """Whether ``ddp`` broadcasts rank 0's buffers in its own way, or in ours."""
    hook = getattr(ddp, "buffer_hook", None)
    is_known = hook is None or isinstance(hook.buffer_comm_hook, BufferBroadcast)
    return bool(ddp.modules_buffers) and is_known


def _give_back(weak_ddp: weakref.ref[DistributedDataParallel]) -> None:
    ddp = weak_ddp()
    if ddp is not None:
        del ddp.buffer_hook
