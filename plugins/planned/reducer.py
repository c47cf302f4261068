"""The reducer of a DDP: made anew with other buckets, given our hook, and given back."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.errors import PluginError

from .reducer_source import ReducerSource

log = logging.getLogger("bytesched")


def reduced_by(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters that ``ddp`` reduces: those that did require a gradient when it was made."""
    if ddp not in _reduced:
        # As much memory as all gradients, for a moment.
        buckets: Any = ddp.reducer._get_zeros_like_grad_buckets()
        _reduced[ddp] = [weakref.ref(p) for bucket in buckets for p in bucket.parameters()]
    return [parameter for one in _reduced[ddp] if (parameter := one()) is not None]


#: a hook of a parameter may keep its DDP alive
_reduced: weakref.WeakKeyDictionary[DistributedDataParallel, list[weakref.ref[nn.Parameter]]] = (
    weakref.WeakKeyDictionary()
)


def why_not_renewed(ddp: DistributedDataParallel) -> str:
    """Why ``ddp`` keeps the buckets that it has; empty if it can have others."""
    if not getattr(ddp, "bucket_bytes_cap_default", False):
        return "bucket_cap_mb was given to DDP"
    return ""


def refuse_effective_join(ddp: DistributedDataParallel | None) -> None:
    """Raises `PluginError` in a join that divides by the ranks that have not joined.

    DDP does so only where it has no hook.
    """
    join: Any = getattr(ddp, "_join_config", None)
    divides_by_all = getattr(ddp, "_divide_by_initial_world_size", True)
    if join is not None and join.enable and not divides_by_all:
        raise PluginError(
            "join(divide_by_initial_world_size=False) is not supported: gradients would be "
            "divided by the number of all ranks; leave it True, or unwrap the optimizer first"
        )


def check_finalized(ddp: DistributedDataParallel) -> None:
    """Raises what DDP does at the beginning of a forward pass after an incomplete round."""
    ddp.reducer._check_reducer_finalized()


def is_joining(ddp: DistributedDataParallel) -> bool:
    """Whether ranks may be through with their inputs, and begin no forward passes.

    DDP's `Join` leaves no mark when it is over.
    """
    join: Any = getattr(ddp, "_join_config", None)
    return join is not None and bool(join.enable)


def is_manual(weak_ddp: weakref.ref[DistributedDataParallel]) -> bool:
    """Whether the script calls ``finalize_backward`` of it at the moment."""
    return bool(getattr(weak_ddp(), "require_manual_backward_finalization", False))


def keep_local(weak_ddp: weakref.ref[DistributedDataParallel]) -> bool:
    """No sums are written into gradients from now on by the reducer; whether it can do that.

    It believes that optimizers have run in backward, which has no other effect.
    """
    ddp = weak_ddp()
    leave = getattr(None if ddp is None else ddp.reducer, "_set_optimizer_in_backward", None)
    if leave is None:
        return False
    leave()
    return True


def renew(
    ddp: DistributedDataParallel, bucket_bytes: int, source: ReducerSource | None = None
) -> None:
    """Gives ``ddp`` a new reducer with buckets up to ``bucket_bytes``, and the hook ``source``.

    On all ranks between the same two rounds; nothing may be under way.

    Args:
        bucket_bytes: 0: those that DDP was made with.
    """
    reduced = {id(parameter) for parameter in reduced_by(ddp)}
    shell: Any = ddp
    with requiring_gradients(ddp, reduced), _capped(shell, bucket_bytes):
        parameters, expect_sparse = shell._build_params_for_reducer()
        names = shell._build_debug_param_to_name_mapping(parameters)
        shell._remove_autograd_hooks()
        # Its buckets go before the new ones come.
        shell.reducer = shell.logger = None
        shell._ddp_init_helper(parameters, expect_sparse, names, shell.static_graph)
    shell._has_rebuilt_buckets = False
    if source is not None:
        _register(ddp, source)
    if getattr(shell, "require_manual_backward_finalization", False):
        # The reducer is new and has not been told.
        shell.require_manual_backward_finalization = True
    if shell.static_graph:
        # As DDP does for the reducer of a copy.
        shell._static_graph_delay_allreduce_enqueued = False
        shell.reducer._set_static_graph()
        if shell.logger is not None:
            shell.logger._set_static_graph()


@contextmanager
def _capped(ddp: Any, bucket_bytes: int) -> Iterator[None]:
    """Inside, a reducer that is made has buckets up to ``bucket_bytes``."""
    kept = {
        name: getattr(ddp, name)
        for name in ("bucket_bytes_cap", "_bucket_config")
        if hasattr(ddp, name)
    }
    # What the rebuilt buckets begin with.
    defaults: Any = dist
    first = defaults._DEFAULT_FIRST_BUCKET_BYTES
    try:
        if bucket_bytes:
            ddp.bucket_bytes_cap = bucket_bytes
            defaults._DEFAULT_FIRST_BUCKET_BYTES = min(first, bucket_bytes)
            if "_bucket_config" in kept:
                ddp._bucket_config = dataclasses.replace(
                    kept["_bucket_config"],
                    bucket_bytes_cap=bucket_bytes,
                    per_bucket_bytes_caps=(),
                    first_bucket_bytes_cap=bucket_bytes,
                )
        yield
    finally:
        defaults._DEFAULT_FIRST_BUCKET_BYTES = first
        for name, value in kept.items():
            setattr(ddp, name, value)


@contextmanager
def requiring_gradients(module: nn.Module, ids: Set[int]) -> Iterator[None]:
    """Inside, the parameters with these ``ids`` require gradients, and no others.

    A DDP reduces what did when it was made, whatever has been frozen or unfrozen since.
    """
    changed = [p for p in module.parameters() if p.requires_grad != (id(p) in ids)]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)


def _register(ddp: DistributedDataParallel, source: ReducerSource) -> None:
    # Not by DDP's own method, whose list goes with copies and pickles of the module.
    c10d: Any = dist
    c10d._register_comm_hook(ddp.reducer, None, source)


def hook(
    ddp: DistributedDataParallel, source: ReducerSource, stand_aside: Callable[[], None]
) -> Callable[[], None]:
    """Makes ``source`` the hook of ``ddp``; returns what undoes it, but for the hook itself.

    Args:
        stand_aside: called before the script registers a hook of its own; then ``ddp`` has a
            reducer without one.
    """
    _register(ddp, source)
    weak_ddp = weakref.ref(ddp)
    _sources[ddp] = source
    _watch_finalizing()
    for name in _REGISTERING:
        vars(ddp)[name] = _Registering(name, weak_ddp, stand_aside)

    def undo() -> None:
        ddp = weak_ddp()
        if ddp is None:
            return
        _sources.pop(ddp, None)
        for name in _REGISTERING:
            vars(ddp).pop(name, None)

    return undo


#: the hooks of all reducers that have one of ours
_sources: weakref.WeakKeyDictionary[DistributedDataParallel, ReducerSource] = (
    weakref.WeakKeyDictionary()
)


def _watch_finalizing() -> None:
    """Once and for good: a script may finalize a backward pass itself, from torch 2.15 on."""
    kind: Any = DistributedDataParallel
    finalize = getattr(kind, "finalize_backward", None)
    if finalize is None or hasattr(finalize, "__wrapped__"):
        return

    @functools.wraps(finalize)
    def finalize_backward(ddp: DistributedDataParallel) -> Any:
        source = _sources.get(ddp)
        if source is None:
            return finalize(ddp)
        if source.is_finalized_ahead:
            source.is_finalized_ahead = False
            return None
        with source.finalizing():
            return finalize(ddp)

    kind.finalize_backward = finalize_backward


#: methods of DDP by which a script registers a hook
_REGISTERING = ("register_comm_hook", "_register_builtin_comm_hook")


class _Registering:
    """In place of a method that registers a hook: the session stands aside before.

    A copy of the DDP, or what is loaded from a file, has DDP's own method.
    """

    def __init__(
        self,
        name: str,
        weak_ddp: weakref.ref[DistributedDataParallel],
        stand_aside: Callable[[], None],
    ) -> None:
        self._name = name
        self._weak_ddp = weak_ddp
        self._stand_aside = stand_aside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._stand_aside()
        vars(self._weak_ddp()).pop(self._name, None)
        return getattr(self._weak_ddp(), self._name)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of a copy, whose class it is looked up in.
        return getattr, (self._weak_ddp(), self._name)


#: gives a DDP something, and returns what takes it off
Give: TypeAlias = Callable[[DistributedDataParallel], Callable[[], None]]


class Attachment:
    """The hook of one DDP, buckets of our size, and what goes with them.

    The DDP is not kept alive. Every change is made on all ranks between the same two rounds, while
    nothing is under way.

    Args:
        bucket_bytes: of the reducer that it gets by `renew`; 0: its own stays.
        stand_aside: called before the script registers a hook of its own.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        source: ReducerSource,
        bucket_bytes: int,
        stand_aside: Callable[[], None],
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._source = source
        self.bucket_bytes = bucket_bytes
        #: whether there are buckets of our size to come
        self.is_renewal_due = bucket_bytes > 0
        #: that gradients have moved
        self._is_said = False
        self._give: Give = lambda ddp: _nothing
        self._take_off: Callable[[], None] = _nothing
        #: takes off all but the hook of the reducer
        self.close = hook(ddp, source, stand_aside)

    def give(self, ddp: DistributedDataParallel, give: Give) -> None:
        """``ddp`` is given this, too, now and whenever it has our hook."""
        self._give = give
        self._take_off = give(ddp)

    def take_off(self) -> None:
        """What was given beside the hook. Idempotent."""
        take_off, self._take_off = self._take_off, _nothing
        take_off()

    def renew(self) -> None:
        """The DDP gets a new reducer, with our hook and buckets of our size."""
        self.is_renewal_due = False
        if (ddp := self._ddp()) is not None:
            self._source.begin_anew()
            self._renew(ddp, self.bucket_bytes, self._source)

    def leave(self) -> None:
        """The DDP gets a reducer as it was made with, without our hook."""
        self.take_off()
        if (ddp := self._ddp()) is not None:
            self._renew(ddp, 0)

    def _renew(
        self, ddp: DistributedDataParallel, bucket_bytes: int, source: ReducerSource | None = None
    ) -> None:
        renew(ddp, bucket_bytes, source)
        if ddp.gradient_as_bucket_view and not self._is_said:
            self._is_said = True
            log.info(
                "gradients lie in other memory from now on, and after each turn with plain DDP: "
                "those that are kept from before are written no more (gradient_as_bucket_view)"
            )

    def come_back(self) -> None:
        """Undoes `leave`."""
        if (ddp := self._ddp()) is not None:
            self._take_off = self._give(ddp)
        self.renew()


def _nothing() -> None:
    pass
