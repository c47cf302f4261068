"""A DistributedDataParallel as a shell: it keeps buffers and no_sync, and reduces no gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.errors import PluginError

from ..planned.hooked_session import HookedSession
from ..planned.reducer import requiring_gradients
from ..routes.groups.group import Group
from .buffers import BufferBroadcast

__all__ = ["finalize_outstanding", "finalizes_by_hand", "ignored_by", "keep_as_shell", "take_over"]


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
        reduced = frozenset(id(p) for p in ddp.parameters() if p.requires_grad)
        session.on_close(take_over(weakref.ref(ddp), reduced))
        half_attached.pop_all()


def take_over(
    weak_ddp: weakref.ref[DistributedDataParallel], reduced: Set[int]
) -> Callable[[], None]:
    """Makes the DDP a shell.

    Returns what undoes it: then it reduces parameters whose ids are ``reduced``.
    """
    ddp = weak_ddp()
    assert ddp is not None
    if finalizes_by_hand(ddp):
        finalize_outstanding(ddp)
    ddp._remove_autograd_hooks()
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = True
    if hasattr(ddp, "lazy_bucket_allocation"):
        _drop_buckets(ddp, reduced)
    if hasattr(ddp, "finalize_backward"):
        # The reducer has nothing to finalize, and would raise.
        vars(ddp)["finalize_backward"] = _FinalizeNothing(weak_ddp)

    def give_back() -> None:
        ddp = weak_ddp()
        if ddp is None:
            return
        vars(ddp).pop("finalize_backward", None)
        _make_reducer(ddp, reduced)
        if ddp.static_graph:
            # As DDP does for the reducer of a copy.
            ddp.reducer._set_static_graph()
            if ddp.logger is not None:
                ddp.logger._set_static_graph()
        if finalizes_by_hand(ddp):
            # The reducer is new and has not been told.
            told: Any = ddp
            told.require_manual_backward_finalization = True

    return give_back


def ignored_by(ddp: DistributedDataParallel) -> Iterator[nn.Parameter]:
    """The parameters that ``ddp`` leaves out of its reduction."""
    names = getattr(ddp, "parameters_to_ignore", ())
    for name, parameter in ddp.module.named_parameters(remove_duplicate=False):
        if name in names:
            yield parameter


def finalizes_by_hand(ddp: DistributedDataParallel) -> bool:
    """Whether the script says when a backward pass is finalized, as it can from torch 2.15 on."""
    return bool(getattr(ddp, "require_manual_backward_finalization", False))


def finalize_outstanding(ddp: Any) -> bool:
    """Ends a backward pass of DDP's own that the script was about to finalize; whether it was."""
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


def _drop_buckets(ddp: DistributedDataParallel, reduced: Set[int]) -> None:
    """Frees DDP's copy of all gradients: a new reducer allocates its buckets in backward."""
    kept = ddp.lazy_bucket_allocation, ddp.find_unused_parameters
    shell: Any = ddp
    # It must not look for parameters that are left out, or it would not wait for its first pass.
    shell.lazy_bucket_allocation, shell.find_unused_parameters = True, False
    try:
        _make_reducer(ddp, reduced)
    finally:
        shell.lazy_bucket_allocation, shell.find_unused_parameters = kept
    ddp._remove_autograd_hooks()


def _make_reducer(ddp: DistributedDataParallel, reduced: Set[int]) -> None:
    with requiring_gradients(ddp, reduced):
        parameters, expect_sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
