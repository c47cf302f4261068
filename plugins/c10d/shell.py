"""What a DistributedDataParallel keeps beside us: its buffers, on a group of ours; and a DDP as a
shell, which keeps no_sync as well and reduces no gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from bytesched.errors import PluginError, TransportError
from bytesched.urgency import urgent

from ..planned.hooked_session import HookedSession
from ..planned.reducer import reduced_by, renew, requiring_gradients
from ..routes.group import Group

__all__ = [
    "BufferBroadcast",
    "broadcasts_buffers",
    "finalize_outstanding",
    "ignored_by",
    "keep_as_shell",
    "take_over",
]


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
        weak_ddp = weakref.ref(ddp)

        def give_back() -> None:
            if (ddp := weak_ddp()) is not None:
                del ddp.buffer_hook

        return give_back

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


def keep_as_shell(
    ddp: DistributedDataParallel, session: HookedSession, buffers: Group | None
) -> None:
    """``ddp`` keeps what it does but for sums, until ``session`` ends.

    Args:
        buffers: what those are broadcast on, if they are.
    """
    with ExitStack() as half_attached:
        half_attached.callback(session.close)
        if buffers is not None:
            session.on_close(BufferBroadcast(buffers, session.raise_first).take_over(ddp))
        # Last of all: from here on, the session sums or nobody does.
        session.on_close(take_over(ddp))
        half_attached.pop_all()


def take_over(ddp: DistributedDataParallel) -> Callable[[], None]:
    """Makes ``ddp`` a shell; returns what undoes it."""
    weak_ddp = weakref.ref(ddp)
    reduced_by(ddp)
    finalize_outstanding(ddp)
    ddp._remove_autograd_hooks()
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = True
    if hasattr(ddp, "lazy_bucket_allocation"):
        _drop_buckets(ddp)
    if hasattr(ddp, "finalize_backward"):
        # The reducer has nothing to finalize, and would raise.
        vars(ddp)["finalize_backward"] = _FinalizeNothing(weak_ddp)

    def give_back() -> None:
        if (ddp := weak_ddp()) is not None:
            vars(ddp).pop("finalize_backward", None)
            renew(ddp, 0)

    return give_back


def ignored_by(ddp: DistributedDataParallel) -> Iterator[nn.Parameter]:
    """The parameters that ``ddp`` leaves out of its reduction."""
    names = getattr(ddp, "parameters_to_ignore", ())
    for name, parameter in ddp.module.named_parameters(remove_duplicate=False):
        if name in names:
            yield parameter


def finalize_outstanding(ddp: Any) -> bool:
    """Ends a backward pass of DDP's own that the script was about to finalize; whether it was.

    From torch 2.15 on, the script may say when a backward pass is finalized.
    """
    if not getattr(ddp, "require_manual_backward_finalization", False):
        return False
    try:
        ddp._check_reducer_finalized()
    except RuntimeError:
        ddp.finalize_backward()
        return True
    return False


class _FinalizeNothing:
    """In place of `finalize_backward`: whoever reads a gradient waits for it.

    `should_finalize_after_backward` is True meanwhile, as the reducer has seen no backward pass.
    A copy of the DDP, or what is loaded from a file, has DDP's own method.
    """

    def __init__(self, weak_ddp: weakref.ref[DistributedDataParallel]) -> None:
        self._weak_ddp = weak_ddp

    def __call__(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise PluginError(
                "finalize_backward() inside backward: under bytesched, call it when backward has "
                "returned, as DDP's should_finalize_after_backward says"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # Of a copy, whose class it is looked up in.
        return getattr, (self._weak_ddp(), "finalize_backward")


def _drop_buckets(ddp: DistributedDataParallel) -> None:
    """Frees DDP's copy of all gradients: a new reducer allocates its buckets in backward."""
    kept = ddp.lazy_bucket_allocation, ddp.find_unused_parameters
    shell: Any = ddp
    # It must not look for parameters that are left out, or it would not wait for its first pass.
    shell.lazy_bucket_allocation, shell.find_unused_parameters = True, False
    try:
        with requiring_gradients(ddp, set(map(id, reduced_by(ddp)))):
            parameters, expect_sparse = ddp._build_params_for_reducer()
            names = ddp._build_debug_param_to_name_mapping(parameters)
            ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    finally:
        shell.lazy_bucket_allocation, shell.find_unused_parameters = kept
    ddp._remove_autograd_hooks()
