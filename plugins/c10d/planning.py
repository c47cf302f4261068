"""A DDP whose gradients are planned: how its ranks come together."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.config import Config
from bytesched.errors import PluginError

from ..agree import statements
from ..planned.beginning import slots_of
from ..planned.bundles import Slot
from ..planned.cutting import cut_whole
from ..planned.ddp_session import DdpSession
from ..planned.reducer import reduced_by, why_not_renewed
from ..routes.groups.opening import kind_of
from ..zero1.updates import open_owners
from .buffers import BufferBroadcast
from .entry import Entry
from .joining import BUCKET_BYTES, carriers
from .shell import finalize_outstanding, finalizes_by_hand

__all__ = ["attach_planned", "is_complex", "refuse_halves", "why_not_sharded"]

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


def _goes_in_halves(ddp: DistributedDataParallel, config: Config) -> bool:
    """Whether a norm can be found before all of its gradients are here."""
    if config.compression != "none":
        return False
    device = next(ddp.parameters()).device
    base = ddp.process_group
    return base.size() == 2 and device.type == "cpu" and kind_of(base, device) == "gloo"


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
    if not _goes_in_halves(ddp, config):
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
        bucket_bytes, chunk_bytes = _sizes(ddp, config, opened.kind)
        partition_bytes = chunk_bytes or bucket_bytes or ddp.bucket_bytes_cap
        has_buffers = ddp.modules_buffers and _has_own_broadcast(ddp)
        buffers = opened.ranks.open("buffers") if has_buffers else None
        owning = opened.ranks.open("statements") if config.shard else None
        wire = opened.wire(buffers, owning)
        run_bytes = max(1, 2 * partition_bytes // wire.size)
        in_halves = owning is None and not config.tune and _goes_in_halves(ddp, config)
        session = DdpSession(
            model,
            ddp,
            opened.terms(
                slots,
                wire,
                partition_bytes=partition_bytes,
                halves_bytes=chunk_bytes // 2 if in_halves else 0,
                open_updates=None
                if owning is None
                else partial(open_owners, wire, owning, entry.base, reduced, run_bytes),
            ),
            cut=partial(cut_whole, chunk_bytes=chunk_bytes),
            bucket_bytes=bucket_bytes,
            is_finalized_ahead=finalizes_by_hand(ddp) and finalize_outstanding(ddp),
        )
    with ExitStack() as half_attached:
        half_attached.callback(session.close)
        half_attached.callback(session.give_back)
        if buffers is not None:
            session.give(ddp, BufferBroadcast(buffers, session.raise_first).take_over)
        half_attached.pop_all()
    return session


def _sizes(ddp: DistributedDataParallel, config: Config, kind: str) -> tuple[int, int]:
    """Those of the buckets that ``ddp`` is to get, and of chunks; 0: as they are."""
    asked = config.partition_bytes
    bucket_bytes = 0 if why_not_renewed(ddp) else asked or BUCKET_BYTES.get(kind, 0)
    return bucket_bytes, asked or _CHUNK_BYTES.get(kind, 0)


def _has_own_broadcast(ddp: DistributedDataParallel) -> bool:
    """Whether buffers are broadcast in DDP's own way."""
    return getattr(ddp, "buffer_hook", None) is None
