"""A session behind an optimizer of pipelined stages; the ranks that have the same ones share it."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bytesched.config import Config
from bytesched.errors import PluginError, in_one_line
from bytesched.log import show

from ..agree import statements
from ..c10d.attaching import refuse_halves
from ..c10d.ddp import why_kept, why_sparse
from ..c10d.entry import Entry
from ..c10d.joining import broadcast, carriers
from ..planned.beginning import add_optimizer, slots_of, stays_plain, why_whole
from ..planned.bundles import Slot
from ..planned.hooked_session import HookedSession
from ..registry import sessions
from ..update.separable import stepping_optimizer
from .reducing import StageReductions, take_from_ddp
from .replicas import RollCall, named_replicas
from .root import StageModules

log = logging.getLogger("bytesched")


def begin(
    optimizer: torch.optim.Optimizer, root: StageModules, config: Config, groups: Any = None
) -> HookedSession | None:
    """The session behind the wrapped optimizer; None if it stays as it was. Collective.

    Args:
        groups: the process group of the ranks that have the same stages; None if DDP has been
            given it, or if the ranks of the job are to find out.

    Raises `PluginError` for what cannot be wrapped, and `MismatchError` if the ranks differ.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PluginError("torch.distributed is not initialized: call init_process_group first")
    rank = dist.get_rank()
    show(config.log_level, rank)
    known = [other for other in sessions(root) if isinstance(other, HookedSession)]
    if known:
        optimizer = stepping_optimizer(optimizer)
        kind = type(optimizer)
        add_optimizer(known[0], optimizer, kind, why_whole(root, optimizer, kind, config))
        return known[0]
    ddps = root.ddps()
    named = named_replicas(root, groups)
    if config.shard:
        raise PluginError("shard = True is not there for pipelines: it needs a model in DDP")
    if config.share:
        raise PluginError(
            f"share = {config.share!r} is not there for pipelines: a turn of the device would be "
            "held while a stage waits for another rank"
        )
    if not config.enabled:
        if not ddps and (named is None or named.size() > 1):
            raise PluginError(
                "nothing would reduce the gradients of replicated stages: enabled is off, and the "
                "stages are in no DistributedDataParallel"
            )
        if ddps and root.schedule.splits_backward:
            log.warning("enabled is off: %s", _skipped(root, rank))
        stays_plain(type(root.schedule).__name__, "enabled is off")
        return None
    refusal = _refusal(root, rank)
    base = named
    if base is None:
        call = RollCall()
        if refusal is not None:
            # None of the others waits for this one.
            call.decline(in_one_line(refusal))
            raise refusal
        base = call.replicas(root, config.timeout_s)
    if base.size() == 1:
        # Its neighbours may have replicas: all compare, or none.
        with Entry(root.schedule.group) as pipeline:
            pipeline.agree(root.schedule.statements(), config.timeout_s)
        stays_plain(type(root.schedule).__name__, "no other rank has the same stages")
        return None
    if ddps and root.schedule.splits_backward and refusal is None:
        log.warning("%s; bytesched reduces them", _skipped(root, rank))
    with ExitStack() as entered:
        entry = entered.enter_context(Entry(base))
        ours = None if named is None else entered.enter_context(Entry(root.schedule.group))
        optimizer = stepping_optimizer(optimizer)
        if refusal is not None:
            raise refusal
        if ours is not None:
            # Ranks that act in other orders would wait for each other for ever.
            ours.agree(root.schedule.statements(), config.timeout_s)
        why = why_whole(root, optimizer, type(optimizer), config)
        session = _attach(optimizer, root, config, entry, is_named=named is not None)
        try:
            add_optimizer(session, optimizer, type(optimizer), why)
            # From here on they train together, so none of them may be left behind.
            entry.agree([], config.timeout_s)
        except BaseException:
            session.close()
            raise
    return session


def decline(root: StageModules, groups: Any, why: str) -> None:
    """Where other ranks wrap, this one does not, and they raise its reason ``why``."""
    if not dist.is_available() or not dist.is_initialized():
        return
    named = named_replicas(root, groups)
    if named is None:
        RollCall().decline(why)
        return
    Entry(root.schedule.group).decline(why)
    if named.size() > 1:
        Entry(named).decline(why)


def _attach(
    optimizer: torch.optim.Optimizer,
    root: StageModules,
    config: Config,
    entry: Entry,
    *,
    is_named: bool,
) -> HookedSession:
    ddps = root.ddps()
    ignored = {
        id(parameter)
        for ddp in ddps
        for name, parameter in ddp.module.named_parameters(remove_duplicate=False)
        if name in getattr(ddp, "parameters_to_ignore", ())
    }
    refuse_halves(entry.base, config)
    slots = slots_of(root, optimizer, ignored=ignored, kind=Slot)
    find_unused = config.find_unused_parameters
    if find_unused is None and ddps:
        find_unused = any(ddp.find_unused_parameters for ddp in ddps)
    entry.agree(
        [
            *root.schedule.statements(),
            *statements(slots, optimizer, config),
            f"find_unused_parameters = {find_unused}",
        ],
        config.timeout_s,
    )
    with carriers(entry, slots[0].parameter.device, config) as opened:
        if is_named and not ddps:
            broadcast(opened.data, chain(root.parameters(), root.buffers()))
        terms = opened.terms(slots, opened.wire())
        session = HookedSession(root, terms, sync=None, find_unused=find_unused)
    with ExitStack() as half_attached:
        half_attached.callback(session.close)
        parameters = [slot.parameter for slot in slots]
        reductions = StageReductions(root, parameters, session, dist.get_rank(), config.timeout_s)
        session.on_close(reductions.close)
        session.on_close(take_from_ddp(root))
        half_attached.pop_all()
    return session


def _refusal(root: StageModules, rank: int) -> PluginError | None:
    """Why gradients of the stages would be others than DDP's, or cannot be carried."""
    ddps = root.ddps()
    why = next((why for ddp in ddps if (why := why_kept(ddp))), "") or why_sparse(root)
    why = why or why_parted(root)
    if not why:
        return None
    if ddps and root.schedule.splits_backward:
        why = f"{why}; {_skipped(root, rank)}"
    return PluginError(f"pipelined stages of rank {rank} cannot be wrapped: {why}")


def _skipped(root: StageModules, rank: int) -> str:
    stages = ", ".join(str(stage.stage_index) for stage in root.schedule.stages)
    return (
        f"stage {stages} on rank {rank} is in a DistributedDataParallel, and {root.schedule.name} "
        "computes weight gradients apart from input gradients, where DDP's hooks are not called: "
        "it reduces none of them and says nothing (pytorch issue 144530)"
    )


def why_parted(root: nn.Module) -> str:
    """Which of its parameters this rank has only a part of; empty if it has all of each.

    Looked for by the modules of torch that are imported: without them there are none.
    """
    sharded = _classes("torch.distributed.fsdp", "FullyShardedDataParallel", "FSDPModule")
    for name, module in root.named_modules():
        if isinstance(module, sharded):
            return f"{name} is sharded by FSDP, which reduces gradients itself"
    parts = _classes("torch.distributed.tensor", "DTensor")
    for name, parameter in root.named_parameters():
        if isinstance(parameter, parts):
            return (
                f"{name} is a DTensor, of which each rank has a part: only plain parameters of "
                "stages are averaged"
            )
    return ""


def _classes(module: str, *names: str) -> tuple[type, ...]:
    found = (getattr(sys.modules.get(module), name, None) for name in names)
    return tuple(kind for kind in found if isinstance(kind, type))
