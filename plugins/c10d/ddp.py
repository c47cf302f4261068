"""PyTorch: an optimizer over a DistributedDataParallel, or over a plain module."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.log import show

from ..left import name_of_ddp
from ..moments.slots import Accumulation
from ..planned import beginning
from ..planned.beginning import add_optimizer, stays_plain
from ..planned.session import PlannedSession
from ..proxies.passes import IN_A_CONTEXT, are_in_a_context
from ..registry import sessions
from ..routes.opening import kind_of, timeout_of
from ..update.separable import refuse_to_shard, stepping_optimizer
from .attaching import attach_hooked, attach_planned, is_complex, why_not_sharded
from .entry import Entry
from .grouping import grouping_of, has_groups, refuse_other_groups
from .shell import broadcasts_buffers

__all__ = [
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


#: attributes of a DDP that are set where only it can reduce
_KEPT: Final = {
    "mixed_precision": "DDP's own mixed precision reduces in a hook of its own",
    "_comm_hooks": "a communication hook is registered on the DDP module",
    "_delay_all_reduce_params": "DDP delays the all-reduce of some parameters",
    "skip_all_reduce_unused_params": "DDP skips the all-reduce of unused parameters",
    "lazy_bucket_allocation": "DDP allocates its buckets anew in every backward pass",
}


def why_kept(ddp: DistributedDataParallel) -> str:
    """Why only ``ddp`` itself can reduce as it was told to; empty if others can."""
    for name, why in _KEPT.items():
        if getattr(ddp, name, None):
            return why
    logger: Any = ddp.logger
    # Such a hook leaves its name there alone.
    if logger is not None and logger._get_ddp_logging_data().strs_map.get("comm_hook"):
        return "a built-in communication hook is registered on the DDP module"
    if not hasattr(ddp, "_remove_autograd_hooks"):
        return f"DDP of torch {torch.__version__} cannot give up its gradient hooks"
    return ""


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
) -> PlannedSession | None:
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
    known = [other for other in sessions(model) if isinstance(other, PlannedSession)]
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
        if known[0].owners is not None:
            refuse_to_shard(optimizer)
        if groups:
            refuse_other_groups(model, known[0], grouping_of(model, groups, base_of(model)))
        add_optimizer(known[0], optimizer, type(optimizer), why_whole(optimizer, model, config))
        return known[0]
    with Entry(base_of(model)) as entry:
        config = _waiting(model, config)
        optimizer = stepping_optimizer(optimizer)
        why = why_whole(optimizer, model, config)
        grouping = grouping_of(model, groups, base_of(model))
        is_grouped = not grouping.suits(ddp)
        is_folded = accumulation is not None
        if config.shard:
            refuse_to_shard(optimizer)
            why_not = why_not_sharded(ddp, config, has_groups=is_grouped, is_folded=is_folded)
            if why_not:
                raise PluginError(f"shard = True cannot be for this model: {why_not}")
        session: PlannedSession
        if ddp is None or is_folded or is_grouped or is_complex(ddp):
            session = attach_hooked(optimizer, model, ddp, config, entry, grouping, accumulation)
        else:
            session = attach_planned(optimizer, model, ddp, config, entry)
        try:
            add_optimizer(session, optimizer, type(optimizer), why)
            # From here on they train together, so none of them may be left behind.
            entry.agree([], config.timeout_s)
        except BaseException:
            session.give_back()
            session.close()
            raise
    return session


def _waiting(model: nn.Module, config: Config) -> Config:
    """``config``, whose waits end as those of the script's own group if it says nothing else."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    timeout_s = timeout_of(base_of(model), device)
    return config.waiting(timeout_s) if timeout_s else config


def decline(model: nn.Module, why: str) -> None:
    """Where others wrap ``model``, this rank does not, and they raise its reason ``why``."""
    if dist.is_available() and dist.is_initialized() and base_of(model).size() > 1:
        Entry(base_of(model)).decline(why)


def why_whole(optimizer: torch.optim.Optimizer, model: nn.Module, config: Config) -> str:
    """Why the barrier cannot be crossed for ``optimizer``; empty if it can."""
    carried = ""
    ddp = find_ddp(model)
    if ddp is not None and _is_nccl(model) and ddp.modules_buffers and not broadcasts_buffers(ddp):
        carried = "on NCCL, the forward pass has collectives of its own: a hook for buffers"
    return beginning.why_whole(model, optimizer, type(optimizer), config, carried=carried)


def _is_nccl(model: nn.Module) -> bool:
    return kind_of(base_of(model), next(model.parameters()).device) == "nccl"
