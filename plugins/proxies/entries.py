"""Functions of torch's that take a tensor without asking its class: they wait for it first.

Where torch asks, ``__torch_function__`` waits (pending.py); what these are given goes past it.
Those that change what decides numbers wait for every update that is owed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn

from ..registry import sessions
from .pending import PendingParameter
from .pending_grads import PendingGrad, ready

#: where they are found, by module and class
_ENTRIES: dict[str, str] = {
    "torch._C": "_broadcast_coalesced _to_dlpack _to_dlpack_versioned",
    "torch._C.ScriptFunction": "__call__",
    "torch._C.ScriptMethod": "__call__",
    "torch._C._nested": "nested_tensor",
    "torch._functorch.eager_transforms": "_wrap_tensor_for_grad",
    "torch._functorch.vmap": "_create_batched_inputs",
    "torch.Tensor": "new new_tensor",
    "torch.autograd": "_engine_run_backward",
    "torch.distributed": "_broadcast_coalesced",
    "torch.utils.dlpack": "to_dlpack",
    "torch": "to_dlpack",
}

#: methods of process groups, which ``torch.distributed`` calls, and scripts may
_OF_GROUPS = """
    _allgather_base all_gather_single all_gather_single_coalesced all_to_all_single allgather
    allgather_coalesced allgather_into_tensor_coalesced alltoall alltoall_base broadcast gather
    gather_into_tensor gather_single new_window recv recv_anysource scatter send
    _reduce_scatter_base allreduce allreduce_coalesced allreduce_sparse reduce reduce_scatter
    reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced
"""
#: methods of what ``new_window`` returns, from torch 2.15 on
_OF_WINDOWS = "put tensor_register"
#: settings of the process, by what changes one in ``torch._C``, and what it is
_SETTINGS: dict[str, Callable[[], Any]] = {
    "_set_default_dtype": torch.get_default_dtype,
    # Nobody says which it is.
    "_set_default_tensor_type": object,
    "_set_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "_set_float32_matmul_precision": torch.get_float32_matmul_precision,
}
_guarded = False


def guard_entries() -> None:
    """From now on, and for good, they wait for what is outstanding among their arguments."""
    global _guarded
    if _guarded:
        return
    _guarded = True
    entries = dict(_ENTRIES)
    if torch.distributed.is_available():
        for group in ("ProcessGroup", "Backend"):
            entries[f"torch._C._distributed_c10d.{group}"] = _OF_GROUPS
        if hasattr(import_module("torch._C._distributed_c10d"), "Window"):
            entries["torch._C._distributed_c10d.Window"] = _OF_WINDOWS
    for place, names in entries.items():
        owner = _found(place)
        for name in names.split():
            if hasattr(owner, name):
                setattr(owner, name, _waiting(getattr(owner, name)))
    for name, current in _SETTINGS.items():
        setattr(torch._C, name, _settling(getattr(torch._C, name), current))
    # It looks at the class of what it is given before it looks at the values.
    nn.Parameter.__new__ = _waiting(nn.Parameter.__new__)  # type: ignore[method-assign]
    torch.Tensor._make_subclass = staticmethod(  # type: ignore[method-assign]
        _waiting(torch.Tensor._make_subclass)
    )
    for kind in (PendingParameter, PendingGrad):
        ForkingPickler.register(kind, _for_processes(kind))


def _found(place: str) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(import_module(module), name) if module else import_module(name)


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            ready(args)
            if kwargs:
                ready(kwargs)
        return function(*args, **kwargs)

    return call


def _settling(change: Callable[..., Any], current: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(change)
    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        # The compiler puts back what is there already.
        if value != current():
            for session in sessions():
                if session.error is None:
                    session.flush()
        return change(value, *args, **kwargs)

    return call


def _for_processes(kind: type[torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    """What multiprocessing sends: the memory of a parameter, not a copy of it."""
    pickler: Any = ForkingPickler
    reducers: dict[type, Callable[..., Any]] = pickler._extra_reducers
    reduce = reducers[nn.Parameter if kind is PendingParameter else torch.Tensor]

    def call(tensor: torch.Tensor) -> Any:
        ready(tensor)
        return reduce(tensor)

    return call
