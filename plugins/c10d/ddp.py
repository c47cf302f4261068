"""PyTorch: an optimizer over a DistributedDataParallel, or over a plain module."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.log import show

from ..engine import beginning
from ..engine.beginning import add_optimizer, slots_of, stays_plain
from ..engine.session import Session
from ..layout.slots import Slot
from ..left import name_of_ddp
from ..moments.folding import Accumulation
from ..planned.hooked_session import HookedSession
from ..planned.session import PlannedSession
from ..proxies.compiling import has_compiled
from ..proxies.passes import IN_A_CONTEXT, are_in_a_context
from ..registry import sessions
from ..routes.group_backend import C10dBackend
from ..routes.groups.opening import kind_of
from ..update.delegation import stepping_optimizer
from ..update.separable import refuse_to_shard
from ..warmup.agree import statements
from .buffers import BufferBroadcast, broadcasts_buffers
from .carrying import broadcast, levels_of
from .entry import Entry
from .folded import attach_folded
from .grouped import attach_grouped
from .grouping import grouping_of, has_groups, reduces_itself, refuse_other_groups
from .hooked import attach_hooked, refuse_part_of_ddp
from .joining import joining
from .planning import attach_planned, refuse_halves, why_not_planned
from .shell import finalizes_by_hand, ignored_by, take_over
from .syncing import Syncing
from .urgent_norms import make_norms_urgent

__all__ = [
    "attach",
    "base_of",
    "begin",
    "decline",
    "find_ddp",
    "why_kept",
    "why_plain",
    "why_sparse",
    "why_whole",
]

log = logging.getLogger("bytesched")


def why_plain(model: nn.Module) -> str:
    """Why gradients of ``model`` cannot be scheduled at all; empty if they can."""
    ddp = find_ddp(model)
    if base_of(model).size() == 1:
        return "there is one rank"
    if why := why_sparse(model):
        return why
    if are_in_a_context():
        return IN_A_CONTEXT
    if any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()) and _is_nccl(model):
        return "SyncBatchNorm reduces in backward, on a communicator beside ours"
    return "" if ddp is None else why_kept(ddp)


def why_sparse(model: nn.Module) -> str:
    """Which module of ``model`` has sparse gradients; empty if none has."""
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            return f"{name or type(module).__name__} has sparse gradients"
    return ""


def why_kept(ddp: DistributedDataParallel) -> str:
    """Why only ``ddp`` itself can reduce as it was told to; empty if others can."""
    if getattr(ddp, "mixed_precision", None) is not None:
        return "DDP's own mixed precision reduces in a hook of its own"
    if getattr(ddp, "_comm_hooks", None):
        return "a communication hook is registered on the DDP module"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return "DDP delays the all-reduce of some parameters"
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        return "DDP skips the all-reduce of unused parameters"
    if getattr(ddp, "lazy_bucket_allocation", False):
        return "DDP allocates its buckets anew in every backward pass"
    if _has_builtin_hook(ddp):
        return "a built-in communication hook is registered on the DDP module"
    if not hasattr(ddp, "_remove_autograd_hooks"):
        return f"DDP of torch {torch.__version__} cannot give up its gradient hooks"
    return ""


def _has_builtin_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a hook was registered that leaves its name in DDP's log alone."""
    logger: Any = ddp.logger
    data = {} if logger is None else logger._get_ddp_logging_data().strs_map
    return bool(data.get("comm_hook"))


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """``model`` if it is a DDP, also under torch.compile."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def base_of(model: nn.Module) -> dist.ProcessGroup:
    """The user's group, over whose ranks the gradients of ``model`` are averaged."""
    ddp = find_ddp(model)
    return ddp.process_group if ddp is not None else dist.distributed_c10d._get_default_group()


def begin(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    config: Config,
    groups: Mapping[Any, Any] | None = None,
    accumulation: Accumulation | None = None,
    *,
    is_configured: bool,
) -> Session | PlannedSession | None:
    """The session behind the wrapped optimizer; None if it stays as it was. Collective.

    Args:
        groups: over which ranks parameters are reduced, beside what layers say (see grouping);
            None: all parameters over all ranks.
        accumulation: gradients are folded into the optimizer's moments, which travel.
        is_configured: whether settings were given with this optimizer.

    Raises `PluginError` for what cannot be wrapped, and `MismatchError` if the ranks differ.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PluginError("torch.distributed is not initialized: call init_process_group first")
    show(config.log_level, dist.get_rank())
    why = why_plain(model) if config.enabled else "enabled is off"
    # One model has one session, whatever its optimizers.
    known = [other for other in sessions(model) if isinstance(other, (Session, PlannedSession))]
    ddp = find_ddp(model)
    name = type(model).__name__ if ddp is None else name_of_ddp(ddp.module)
    if stays_plain(name, why):
        is_lost = base_of(model).size() > 1 and has_groups(model, groups)
        if is_lost:
            why = f"nothing would reduce the gradients of parameters in groups: {why}"
        if not known:
            decline(model, why)
        if is_lost:
            raise PluginError(why)
        if accumulation is not None and config.enabled:
            raise PluginError(f"nothing would fold the gradients (accumulate='adama'): {why}")
        return None
    if known:
        if is_configured:
            log.warning("already wrapped; settings from the first wrap() stay in force")
        if accumulation is not None:
            raise PluginError(
                "accumulate='adama': this model has been wrapped already, with another optimizer"
            )
        optimizer = stepping_optimizer(optimizer)
        if isinstance(known[0], PlannedSession) and known[0].owners is not None:
            refuse_to_shard(optimizer)
        if groups:
            partitions = known[0].partitions if isinstance(known[0], HookedSession) else {}
            grouping = grouping_of(model, groups, base_of(model))
            reduced = [slot.parameter for slot in known[0].slots]
            refuse_other_groups(model, reduced, partitions, grouping)
        add_optimizer(known[0], optimizer, type(optimizer), why_whole(optimizer, model, config))
        return known[0]
    with Entry(base_of(model)) as entry:
        optimizer = stepping_optimizer(optimizer)
        why = why_whole(optimizer, model, config)
        if config.shard:
            refuse_to_shard(optimizer)
        grouping = grouping_of(model, groups, base_of(model))
        is_grouped = not reduces_itself(ddp, grouping)
        session: Session | PlannedSession
        why_live = why_not_planned(
            model, ddp, config, has_groups=is_grouped, is_folded=accumulation is not None
        )
        if config.shard and (why_live or ddp is None):
            why_live = why_live or "it is not in DistributedDataParallel"
            raise PluginError(f"shard = True cannot be for this model: {why_live}")
        if accumulation is not None:
            session = attach_folded(
                optimizer, model, ddp, config, entry, accumulation, has_groups=is_grouped
            )
        elif is_grouped:
            session = attach_grouped(optimizer, model, ddp, config, entry, grouping)
        elif not why_live:
            if ddp is None:
                session = attach_hooked(optimizer, model, config, entry)
            else:
                session = attach_planned(optimizer, model, ddp, config, entry)
        else:
            session = attach(optimizer, model, config, entry)
        try:
            add_optimizer(session, optimizer, type(optimizer), why)
            # From here on they train together, so none of them may be left behind.
            entry.agree([], config.timeout_s)
        except BaseException:
            if isinstance(session, PlannedSession):
                session.give_back()
            session.close()
            raise
    return session


def decline(model: nn.Module, why: str) -> None:
    """Where others wrap ``model``, this rank does not, and they raise its reason ``why``."""
    if dist.is_available() and dist.is_initialized() and base_of(model).size() > 1:
        Entry(base_of(model)).decline(why)


def attach(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    config: Config,
    entry: Entry,
) -> Session:
    """A session for ``model``, to which ``optimizer`` is to be added; collective.

    Args:
        entry: what the ranks go through together.
        has_groups: some ranks reduce some parameters, which can only be refused.
    """
    ddp = find_ddp(model)
    if ddp is None:
        refuse_part_of_ddp(model)
    base = base_of(model)
    ignored = set() if ddp is None else {id(p) for p in ignored_by(ddp)}
    slots = slots_of(model, optimizer, ignored=ignored, kind=Slot)
    kind = kind_of(base, slots[0].parameter.device)
    find_unused = _find_unused(ddp, config)
    refuse_halves(base, config)
    entry.agree(
        [
            *statements(slots, optimizer, config),
            f"find_unused_parameters = {find_unused}",
            f"static_graph = {ddp is not None and ddp.static_graph}",
        ],
        config.timeout_s,
    )
    if config.compression != "none" and any(slot.parameter.is_complex() for slot in slots):
        log.info("compression = %r: complex gradients are sent as they are", config.compression)
    name = f"session{entry.number}"
    with joining(base, name, config) as ranks:
        data, control = ranks.open("data", kind), ranks.open("control")
        buffers = None
        if ddp is not None and kind in ("gloo", "nccl") and broadcasts_buffers(ddp):
            buffers = ranks.open("buffers")
        observers = ranks.observers()
        device = slots[0].parameter.device
        if ddp is None:
            broadcast(data, model)
        levels = levels_of(base, ranks, data, device, name, config)
    backend = C10dBackend(data, control, buffers, levels)
    # A session ends with its model, so it must not keep it alive.
    weak_ddp = None if ddp is None else weakref.ref(ddp)
    session = Session(
        model,
        slots,
        config,
        backend=backend,
        sync=Syncing(model, weak_ddp),
        find_unused=find_unused,
        static_graph=bool(ddp is not None and ddp.static_graph),
        observers=observers,
    )
    with ExitStack() as half_attached:
        half_attached.callback(session.close)
        session.on_close(make_norms_urgent(model))
        if ddp is not None and weak_ddp is not None:
            if buffers is not None:
                session.on_close(BufferBroadcast(buffers, session.raise_first).take_over(ddp))
            # Last of all: from here on, gradients are averaged by the session or not at all. DDP
            # learns a static graph once, as the compiler does its code; DDP does not compress; and
            # what a script finalizes late must not change hands before.
            can_stop = ddp is model and not ddp.static_graph and not has_compiled(model)
            can_stop = can_stop and config.compression == "none" and not finalizes_by_hand(ddp)
            reduced = frozenset(id(p) for p in ddp.parameters() if p.requires_grad)
            session.take_over(partial(take_over, weak_ddp, reduced), can_stop=can_stop)
        half_attached.pop_all()
    return session


def why_whole(optimizer: torch.optim.Optimizer, model: nn.Module, config: Config) -> str:
    """Why the barrier cannot be crossed for ``optimizer``; empty if it can."""
    carried = ""
    ddp = find_ddp(model)
    if ddp is not None and _is_nccl(model) and ddp.modules_buffers and not broadcasts_buffers(ddp):
        carried = "on NCCL, the forward pass has collectives of its own: a hook for buffers"
    return beginning.why_whole(model, optimizer, type(optimizer), config, carried=carried)


def _find_unused(ddp: DistributedDataParallel | None, config: Config) -> bool | None:
    if config.find_unused_parameters is not None:
        return config.find_unused_parameters
    if ddp is None or ddp.static_graph:
        return None
    return bool(ddp.find_unused_parameters)


def _is_nccl(model: nn.Module) -> bool:
    return kind_of(base_of(model), next(model.parameters()).device) == "nccl"
