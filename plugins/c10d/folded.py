"""A model whose gradients are folded into moments: how its ranks come together."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.config import Config

from ..agree import statements
from ..moments.session import FoldedSession
from ..moments.slots import Accumulation, MomentSlot, folding_statements
from ..planned.beginning import slots_of
from .buffers import broadcasts_buffers
from .entry import Entry
from .hooked import refuse_part_of_ddp
from .joining import broadcast, carriers
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
    ignored = () if ddp is None else {id(parameter) for parameter in ignored_by(ddp)}
    slots = slots_of(model, optimizer, ignored=ignored, kind=MomentSlot)
    folded = folding_statements(
        accumulation,
        slots,
        config,
        find_unused=_finds_unused(ddp, config),
        has_groups=has_groups,
    )
    entry.agree([*folded, *statements(slots, optimizer, config)], config.timeout_s)
    with carriers(entry, slots[0].parameter.device, config) as opened:
        buffers = None
        if ddp is None:
            broadcast(opened.data, model)
        elif opened.kind in ("gloo", "nccl") and broadcasts_buffers(ddp):
            buffers = opened.ranks.open("buffers")
        session = FoldedSession(model, opened.terms(slots, opened.wire(buffers)), accumulation)
    if config.tune and opened.data.rank == 0:
        log.warning("tune is on, but sizes stay as they are with accumulate='adama'")
    if ddp is not None:
        keep_as_shell(ddp, session, buffers)
    return session


def _finds_unused(ddp: DistributedDataParallel | None, config: Config) -> bool:
    if config.find_unused_parameters is not None or ddp is None or ddp.static_graph:
        return bool(config.find_unused_parameters)
    return bool(ddp.find_unused_parameters)
