"""A model, in DDP or not: how its ranks come together in a session.

Gradients of a DDP are planned behind its own reducer. Hooks of ours take those of a plain module,
and of a DDP of which some ranks reduce some parameters, whose gradients are complex, or folded into
moments: there DDP cannot be the source.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.config import Config
from bytesched.errors import PluginError

from ..agree import statements
from ..moments.session import FoldedSession
from ..moments.slots import Accumulation, MomentSlot, folding_statements
from ..planned.beginning import slots_of
from ..planned.bundles import Slot
from ..planned.cutting import cut_whole
from ..planned.ddp_session import DdpSession
from ..planned.hooked_session import HookedSession
from ..planned.reducer import is_joining, reduced_by, why_not_renewed
from ..planned.wire import GroupWire, LoneWire, Summing
from ..routes.group import Group
from ..routes.opening import kind_of
from ..zero1.updates import open_owners
from .entry import Entry
from .grouping import Grouping, partitions_of, refuse_reduced
from .grouping import statements as group_statements
from .joining import BUCKET_BYTES, broadcast, carriers
from .shell import (
    BufferBroadcast,
    broadcasts_buffers,
    finalize_outstanding,
    ignored_by,
    keep_as_shell,
)

__all__ = ["attach_hooked", "attach_planned", "is_complex", "refuse_halves", "why_not_sharded"]

log = logging.getLogger("bytesched")

#: of chunks, by the kind of the carrier, where settings say nothing
_CHUNK_BYTES: Final = {"gloo": 1 << 20}


def why_not_sharded(
    ddp: DistributedDataParallel | None, config: Config, *, has_groups: bool, is_folded: bool
) -> str:
    """Why parameters cannot have owners; empty if they can.

    Args:
        ddp: the model, if it is one.
    """
    if ddp is None:
        return "it is not in DistributedDataParallel"
    if has_groups:
        return "some ranks reduce some parameters"
    if is_folded:
        return "gradients are folded into moments"
    if config.share:
        return "devices are shared"
    if config.compression != "none":
        return "gradients are compressed"
    return "gradients are complex" if is_complex(ddp) else ""


def is_complex(ddp: DistributedDataParallel) -> bool:
    """Whether DDP's hook is shown half of some gradients, as real numbers."""
    return any(parameter.is_complex() for parameter in ddp.parameters())


def refuse_halves(base: dist.ProcessGroup, config: Config) -> None:
    """Raises PluginError where ``split = "on"`` cannot be: gradients are not planned.

    One rank sends nothing, however that is asked for.
    """
    if config.split == "on" and base.size() > 1:
        raise PluginError(
            "split = 'on': gradients go in two halves between two ranks over Gloo on CPUs, of a "
            "model in DistributedDataParallel, uncompressed and with devices of their own; leave "
            "split as it is"
        )


# -- DDP's reducer is the source -------------------------------------------------------


def attach_planned(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    ddp: DistributedDataParallel,
    config: Config,
    entry: Entry,
) -> DdpSession:
    """A session for ``model``, to which ``optimizer`` is to be added; collective.

    Args:
        model: ``ddp``, or what torch.compile has made of it.
        entry: what the ranks go through together.
    """
    goes_in_halves = _goes_in_halves(ddp, config)
    if not goes_in_halves:
        refuse_halves(entry.base, config)
    slots = slots_of(ddp, optimizer, kind=Slot, is_whole=True)
    reduced = reduced_by(ddp)
    entry.agree(
        [
            *statements(slots, optimizer, config),
            f"find_unused_parameters = {ddp.find_unused_parameters}",
            f"static_graph = {ddp.static_graph}",
            f"buckets of {ddp.bucket_bytes_cap} bytes",
        ],
        config.timeout_s,
    )
    with carriers(entry, reduced[0].device, config) as opened:
        asked, kind = config.partition_bytes, opened.kind
        # 0: as they are.
        bucket_bytes = 0 if why_not_renewed(ddp) else asked or BUCKET_BYTES[kind]
        chunk_bytes = asked or _CHUNK_BYTES.get(kind, 0)
        partition_bytes = chunk_bytes or bucket_bytes or ddp.bucket_bytes_cap
        # A hook for buffers of the script's own stays.
        has_buffers = ddp.modules_buffers and getattr(ddp, "buffer_hook", None) is None
        buffers = opened.ranks.open("buffers") if has_buffers else None
        owning = opened.ranks.open("statements") if config.shard else None
        wire = opened.wire(buffers, owning)
        open_updates = None
        if owning is not None:
            run_bytes = max(1, 2 * partition_bytes // wire.size)
            open_updates = partial(open_owners, wire, owning, entry.base, reduced, run_bytes)
        in_halves = goes_in_halves and owning is None and not config.tune
        session = DdpSession(
            model,
            ddp,
            opened.terms(
                slots,
                wire,
                partition_bytes=partition_bytes,
                halves_bytes=chunk_bytes // 2 if in_halves else 0,
                open_updates=open_updates,
            ),
            cut=partial(cut_whole, chunk_bytes=chunk_bytes),
            bucket_bytes=bucket_bytes,
            is_finalized_ahead=finalize_outstanding(ddp),
        )
    with ExitStack() as half_attached:
        half_attached.callback(session.close)
        half_attached.callback(session.give_back)
        if buffers is not None:
            session.give(ddp, BufferBroadcast(buffers, session.raise_first).take_over)
        half_attached.pop_all()
    return session


def _goes_in_halves(ddp: DistributedDataParallel, config: Config) -> bool:
    """Whether a norm can be found before all of its gradients are here."""
    if config.compression != "none":
        return False
    device = next(ddp.parameters()).device
    base = ddp.process_group
    return base.size() == 2 and device.type == "cpu" and kind_of(base, device) == "gloo"


# -- hooks of ours are -----------------------------------------------------------------


def attach_hooked(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    ddp: DistributedDataParallel | None,
    config: Config,
    entry: Entry,
    grouping: Grouping,
    accumulation: Accumulation | None = None,
) -> HookedSession:
    """A session for ``model``, to which ``optimizer`` is to be added; collective.

    Args:
        ddp: ``model``, or the DDP that is compiled there; None: a plain module.
        entry: what the ranks go through together.
        accumulation: gradients are folded into the optimizer's moments, which travel.
    """
    if ddp is None:
        _refuse_part_of_ddp(model)
    ignored = set() if ddp is None else {id(p) for p in ignored_by(ddp)} - grouping.ids
    find_unused = config.find_unused_parameters
    if find_unused is None and grouping.ids and accumulation is None:
        # Whether an expert is used depends on the batch, and DDP does not look at it.
        find_unused = True
    elif find_unused is None and ddp is not None and not ddp.static_graph:
        find_unused = bool(ddp.find_unused_parameters)
    slots: Sequence[Slot]
    if accumulation is None:
        if ddp is not None:
            refuse_reduced(ddp, grouping)
        refuse_halves(entry.base, config)
        if grouping.ids and config.hierarchy == "on":
            raise PluginError(
                "hierarchy = 'on' is not there for a model with parameters that only some ranks "
                "reduce: leave it out"
            )
        slots = slots_of(model, optimizer, ignored=ignored, kind=Slot)
        said = group_statements(slots, grouping)
    else:
        moments = slots_of(model, optimizer, ignored=ignored, kind=MomentSlot)
        slots, has_groups = moments, not grouping.suits(ddp)
        said = folding_statements(
            accumulation, moments, config, find_unused=find_unused, has_groups=has_groups
        )
    is_static = ddp is not None and ddp.static_graph
    said += statements(slots, optimizer, config)
    said += [f"find_unused_parameters = {find_unused}", f"static_graph = {is_static}"]
    entry.agree(said, config.timeout_s)
    with carriers(entry, slots[0].parameter.device, config) as opened:
        has_buffers = ddp is not None and broadcasts_buffers(ddp)
        buffers = opened.ranks.open("buffers") if has_buffers else None
        parts: list[Group] = []

        def wire_of(number: int, place: int, members: Sequence[int]) -> Summing:
            if len(members) == 1:
                return LoneWire()
            part = opened.ranks.open(f"part{number}of{place}", opened.kind, members)
            parts.append(part)
            return GroupWire(part, part, [], opened.device)

        control, are_given = opened.control, ddp is None
        partitions = partitions_of(slots, grouping, control, wire_of, are_given=are_given)
        if ddp is None:
            tensors = [*model.parameters(), *model.buffers()]
            broadcast(opened.data, [t for t in tensors if id(t) not in grouping.parted])
            for part in parts:
                mine = tuple(part.members)
                broadcast(part, [t for t in tensors if grouping.of(t) == mine])
        wire = opened.wire(*parts, buffers, has_parts=bool(partitions))
        session: HookedSession
        if accumulation is not None:
            session = FoldedSession(model, opened.terms(slots, wire), accumulation)
        else:
            # A session ends with its model, so it must not keep it alive.
            synced = (lambda: True) if ddp is None else partial(_is_synced, weakref.ref(ddp))
            session = HookedSession(
                model,
                opened.terms(slots, wire),
                sync=synced,
                find_unused=find_unused,
                is_static=is_static,
                partitions=partitions,
            )
    if accumulation is not None and config.tune and opened.data.rank == 0:
        log.warning("tune is on, but sizes stay as they are with accumulate='adama'")
    if ddp is not None:
        keep_as_shell(ddp, session, buffers)
    return session


def _refuse_part_of_ddp(model: nn.Module) -> None:
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
    mine = set(map(id, model.parameters()))
    # Not isinstance: it reads the class of proxies of all kinds.
    ddps = (o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel))
    return not mine.isdisjoint(map(id, chain.from_iterable(o.module.parameters() for o in ddps)))


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
