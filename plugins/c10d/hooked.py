"""A model whose gradients hooks of ours take: how its ranks meet.

It is a plain module, or a DDP of which some ranks reduce some parameters, or whose gradients are
complex: there DDP cannot be the source.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.config import Config
from bytesched.errors import PluginError

from ..agree import statements
from ..planned.beginning import slots_of
from ..planned.bundles import Slot
from ..planned.hooked_session import HookedSession
from ..planned.reducer import is_joining
from ..planned.wire import GroupWire, LoneWire, Summing
from ..routes.groups.group import Group
from .buffers import broadcasts_buffers
from .entry import Entry
from .grouping import (
    Grouping,
    partitions_of,
    refuse_levels,
    refuse_other_values,
    refuse_reduced,
)
from .grouping import statements as group_statements
from .joining import broadcast, carriers
from .planning import refuse_halves
from .shell import ignored_by, keep_as_shell

__all__ = ["attach_hooked", "refuse_part_of_ddp"]


def attach_hooked(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    ddp: DistributedDataParallel | None,
    config: Config,
    entry: Entry,
    grouping: Grouping,
) -> HookedSession:
    """A session for ``model``, to which ``optimizer`` is to be added; collective.

    Args:
        ddp: ``model``, or the DDP that is compiled there; None: a plain module.
        entry: what the ranks go through together.
    """
    if ddp is None:
        refuse_part_of_ddp(model)
    else:
        refuse_reduced(ddp, grouping)
    refuse_halves(entry.base, config)
    if grouping.ids:
        refuse_levels(config)
    ignored = set() if ddp is None else {id(p) for p in ignored_by(ddp)} - grouping.ids
    slots = slots_of(model, optimizer, ignored=ignored, kind=Slot)
    find_unused = _finds_unused(ddp, config, grouping)
    is_static = ddp is not None and ddp.static_graph
    entry.agree(
        [
            *group_statements(slots, grouping),
            *statements(slots, optimizer, config),
            f"find_unused_parameters = {find_unused}",
            f"static_graph = {is_static}",
        ],
        config.timeout_s,
    )
    # A session ends with its model, so it must not keep it alive.
    weak_ddp = None if ddp is None else weakref.ref(ddp)
    with carriers(entry, slots[0].parameter.device, config) as opened:
        has_buffers = ddp is not None and broadcasts_buffers(ddp)
        buffers = opened.ranks.open("buffers") if has_buffers else None
        parts: list[Group] = []

        def wire_of(number: int, place: int, members: Sequence[int]) -> Summing:
            if len(members) == 1:
                return LoneWire()
            part = opened.open_part(members, f"part{number}of{place}", opened.kind)
            parts.append(part)
            return GroupWire(part, part, [], opened.device)

        partitions = partitions_of(slots, grouping, opened.control, wire_of)
        if ddp is None:
            broadcast(opened.data, model, left_out=grouping.parted)
            for part in parts:
                broadcast(part, model, left_out=grouping.outside(part.members))
        else:
            refuse_other_values(slots, grouping, opened.control)
        wire = opened.wire(*parts, buffers, has_parts=bool(partitions))
        session = HookedSession(
            model,
            opened.terms(slots, wire),
            sync=(lambda: True) if weak_ddp is None else partial(_is_synced, weak_ddp),
            find_unused=find_unused,
            is_static=is_static,
            partitions=partitions,
        )
    if ddp is not None:
        keep_as_shell(ddp, session, buffers)
    return session


def _finds_unused(
    ddp: DistributedDataParallel | None, config: Config, grouping: Grouping
) -> bool | None:
    if config.find_unused_parameters is not None:
        return config.find_unused_parameters
    if grouping.ids:
        # Whether an expert is used depends on the batch, and DDP does not look at it.
        return True
    return None if ddp is None or ddp.static_graph else bool(ddp.find_unused_parameters)


def refuse_part_of_ddp(model: nn.Module) -> None:
    """Raises PluginError if a DDP reduces parameters of ``model``: both would."""
    if not _is_reduced_by_ddp(model):
        return
    # It may be garbage that is not collected yet.
    gc.collect()
    if _is_reduced_by_ddp(model):
        raise PluginError(
            "parameters of the module belong to a DistributedDataParallel: wrap that one, neither "
            "its .module nor what contains it"
        )


def _is_reduced_by_ddp(model: nn.Module) -> bool:
    mine = {id(parameter) for parameter in model.parameters()}
    return any(
        id(parameter) in mine
        # Not isinstance: it reads the class of proxies of all kinds.
        for owner in gc.get_objects()
        if issubclass(type(owner), DistributedDataParallel)
        for parameter in owner.module.parameters()
    )


def _is_synced(weak_ddp: weakref.ref[DistributedDataParallel]) -> bool:
    """Whether gradients of the backward pass are reduced whose forward pass begins."""
    ddp = weak_ddp()
    if ddp is None:
        return True
    if is_joining(ddp):
        raise PluginError(
            "DistributedDataParallel.join() shadows DDP's own all-reduces, but not those of "
            "bytesched: pad the shorter ranks' data, or unwrap the optimizer first"
        )
    # Scripts also set it without no_sync().
    return bool(ddp.require_backward_grad_sync)
