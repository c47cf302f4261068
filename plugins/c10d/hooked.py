"""A model whose gradients hooks of ours take: how its ranks come together."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.tunable import Setting

from ..planned.beginning import slots_of
from ..planned.bundles import Slot
from ..planned.hooked_session import HookedSession
from ..planned.wire import GroupWire
from ..routes.groups.opening import kind_of
from ..warmup.agree import statements
from .carrying import broadcast, levels_of
from .entry import Entry
from .joining import joining
from .planning import BUCKET_BYTES, refuse_halves

__all__ = ["attach_hooked", "join_hooked", "refuse_part_of_ddp", "setting_of", "syncs_always"]


def attach_hooked(
    optimizer: torch.optim.Optimizer, model: nn.Module, config: Config, entry: Entry
) -> HookedSession:
    """A session for ``model``, to which ``optimizer`` is to be added; collective.

    Args:
        entry: what the ranks go through together.
    """
    refuse_part_of_ddp(model)
    slots = slots_of(model, optimizer, kind=Slot)
    refuse_halves(entry.base, config)
    entry.agree(
        [
            *statements(slots, optimizer, config),
            f"find_unused_parameters = {config.find_unused_parameters}",
        ],
        config.timeout_s,
    )
    return join_hooked(
        model,
        slots,
        config,
        entry,
        sync=syncs_always,
        find_unused=config.find_unused_parameters,
        is_broadcast=True,
    )


def join_hooked(
    root: nn.Module,
    slots: Sequence[Slot],
    config: Config,
    entry: Entry,
    *,
    sync: Callable[[], bool] | None,
    find_unused: bool | None,
    is_broadcast: bool,
) -> HookedSession:
    """A session for ``root``, on whose ``slots`` the ranks have agreed; collective.

    Args:
        entry: what the ranks go through together.
        sync: see `HookedSession`.
        find_unused: see `HookedSession`.
        is_broadcast: all ranks begin with the values of the first one.
    """
    base = entry.base
    device = slots[0].parameter.device
    kind = kind_of(base, device)
    name = f"session{entry.number}"
    with joining(base, name, config) as ranks:
        data = ranks.open("data", kind)
        control = data if kind == "gloo" else ranks.open("control")
        # Of what fails from here on, there is a trace.
        observers = ranks.observers()
        if is_broadcast:
            broadcast(data, root)
        levels = levels_of(base, ranks, data, device, name, config)
        session = HookedSession(
            root,
            slots,
            config,
            GroupWire(data, control, [], device, levels),
            observers,
            setting=setting_of(config, kind),
            divisor=data.size,
            sync=sync,
            find_unused=find_unused,
            carrier=kind,
        )
    return session


def setting_of(config: Config, kind: str) -> Setting:
    """The sizes of buckets of ours, over a carrier of this ``kind``."""
    partition_bytes = config.partition_bytes or BUCKET_BYTES[kind]
    return Setting(partition_bytes, max(config.credit_bytes, 2 * partition_bytes), config.policy)


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


def syncs_always() -> bool:
    """Every backward pass is reduced."""
    return True
