"""A model whose gradients are folded into moments: how its ranks come together."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.config import Config

from ..moments.folding import Accumulation, folding_statements
from ..moments.session import FoldedSession
from ..moments.slots import MomentSlot
from ..planned.beginning import slots_of
from ..planned.wire import GroupWire
from ..routes.groups.opening import kind_of
from ..warmup.agree import statements
from .buffers import broadcasts_buffers
from .carrying import broadcast, levels_of
from .entry import Entry
from .hooked import refuse_part_of_ddp, setting_of
from .joining import joining
from .shell import ignored_by, keep_as_shell

__all__ = ["attach_folded"]

log = logging.getLogger("bytesched")


def attach_folded(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    ddp: DistributedDataParallel | None,
    config: Config,
    entry: Entry,
    accumulation: Accumulation,
    *,
    has_groups: bool,
) -> FoldedSession:
    """A session for ``model``, to which ``optimizer`` is to be added; collective.

    Args:
        ddp: what ``model`` is, if it is one; its own reducer gets nothing to do.
        entry: what the ranks go through together.
        has_groups: some parameters are reduced over some ranks.
    """
    if ddp is None:
        refuse_part_of_ddp(model)
    base = entry.base
    ignored = () if ddp is None else {id(parameter) for parameter in ignored_by(ddp)}
    slots = slots_of(model, optimizer, ignored=ignored, kind=MomentSlot)
    device = slots[0].parameter.device
    kind = kind_of(base, device)
    folded = folding_statements(
        accumulation,
        slots,
        config,
        find_unused=_finds_unused(ddp, config),
        has_groups=has_groups,
    )
    entry.agree([*folded, *statements(slots, optimizer, config)], config.timeout_s)
    name = f"session{entry.number}"
    with joining(base, name, config) as ranks:
        data = ranks.open("data", kind)
        control = data if kind == "gloo" else ranks.open("control")
        buffers = None
        # Of what fails from here on, there is a trace.
        observers = ranks.observers()
        if ddp is None:
            broadcast(data, model)
        elif kind in ("gloo", "nccl") and broadcasts_buffers(ddp):
            buffers = ranks.open("buffers")
        others = [] if buffers is None else [buffers]
        levels = levels_of(base, ranks, data, device, name, config)
        session = FoldedSession(
            model,
            slots,
            config,
            GroupWire(data, control, others, device, levels),
            observers,
            accumulation=accumulation,
            setting=setting_of(config, kind),
        )
    if config.tune and data.rank == 0:
        log.warning("tune is on, but sizes stay as they are with accumulate='adama'")
    if ddp is not None:
        keep_as_shell(ddp, session, buffers)
    return session


def _finds_unused(ddp: DistributedDataParallel | None, config: Config) -> bool:
    if config.find_unused_parameters is not None or ddp is None or ddp.static_graph:
        return bool(config.find_unused_parameters)
    return bool(ddp.find_unused_parameters)
