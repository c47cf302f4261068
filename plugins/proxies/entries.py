"""Functions of torch's that take a tensor without asking its class: they wait for it first.

Where torch asks, ``__torch_function__`` waits (pending.py); what these are given goes past it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias
from weakref import WeakMethod

import torch
from torch import nn

from .lazy_grads import LazyGrad, keep_apart, plain, ready
from .pending import PendingParameter
from .pending_grads import PendingGrad

__all__ = ["Watch", "guard_entries", "watch_reductions"]

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
"""
#: methods of what ``new_window`` returns, from torch 2.15 on
_OF_WINDOWS = "put tensor_register"
#: those that reduce
_REDUCING = """
    _reduce_scatter_base allreduce allreduce_coalesced allreduce_sparse reduce reduce_scatter
    reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced
"""

#: is told of a reduction of the script's: its process group, and how many elements it sends
Watch: TypeAlias = Callable[[Any, int], None]

#: those that look at the moment, none of them kept alive
_watches: tuple[WeakMethod[Watch], ...] = ()

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
            entries[f"torch._C._distributed_c10d.{group}"] = _OF_GROUPS + _REDUCING
        if hasattr(import_module("torch._C._distributed_c10d"), "Window"):
            entries["torch._C._distributed_c10d.Window"] = _OF_WINDOWS
        # What is sent here goes over its ``Backend``.
        groups = torch.distributed.ProcessGroup
        for name in _REDUCING.split():
            if hasattr(groups, name):
                setattr(groups, name, _watched(getattr(groups, name)))
    for place, names in entries.items():
        owner = _found(place)
        for name in names.split():
            if hasattr(owner, name):
                setattr(owner, name, _waiting(getattr(owner, name)))
    nn.Parameter.__new__ = _for_parameters(nn.Parameter.__new__)  # type: ignore[method-assign]
    torch.Tensor._make_subclass = staticmethod(  # type: ignore[method-assign]
        _waiting(torch.Tensor._make_subclass)
    )
    for kind in (PendingParameter, LazyGrad, PendingGrad):
        ForkingPickler.register(kind, _for_processes(kind))


def watch_reductions(watch: Watch) -> Callable[[], None]:
    """Calls the method ``watch`` before every reduction of the script's.

    Returns what ends that; so does the end of its object.
    """
    global _watches
    watching = WeakMethod(watch)
    _watches = (*(other for other in _watches if other() is not None), watching)

    def end() -> None:
        global _watches
        _watches = tuple(other for other in _watches if other is not watching)

    return end


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for watching in _watches:
            if (watch := watching()) is not None:
                given = (*args[1:], *kwargs.values())
                # A scatter has what it sends beside what it receives.
                watch(args[0], max(map(_elements, given), default=0))
        return function(*args, **kwargs)

    return call


def _elements(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(_elements, value)) if isinstance(value, (list, tuple)) else 0


def _found(place: str) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(import_module(module), name) if module else import_module(name)


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            ready(args)
            if kwargs:
                ready(kwargs)
            if args and type(args[0]) is LazyGrad:
                # Its address may be given away.
                keep_apart(args[0])
        return function(*args, **kwargs)

    return call


def _for_parameters(new: Callable[..., Any]) -> Callable[..., Any]:
    """``Parameter(data)`` looks at the class of ``data`` before it looks at the values."""

    @functools.wraps(new)
    def call(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if type(data) in (PendingParameter, LazyGrad, PendingGrad):
            ready(data)
            if type(data) is LazyGrad:
                keep_apart(data)
            data = plain(data)
        return new(cls, data, *args, **kwargs)

    return call


def _for_processes(kind: type[torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    """What multiprocessing sends: the memory of a parameter, not a copy of it."""
    pickler: Any = ForkingPickler
    reducers: dict[type, Callable[..., Any]] = pickler._extra_reducers
    reduce = reducers[nn.Parameter if kind is PendingParameter else torch.Tensor]

    def call(tensor: torch.Tensor) -> Any:
        ready(tensor)
        if type(tensor) is LazyGrad:
            keep_apart(tensor)
        return reduce(plain(tensor))

    return call
