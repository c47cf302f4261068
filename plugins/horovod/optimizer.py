"""Horovod: the optimizer that ``hvd.DistributedOptimizer`` has made.

It stays what it is, a shell: its gradient hooks mark when a gradient is complete, its
``synchronize`` and ``step`` when a round ends. Gradients travel through Horovod's own all-reduce.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any, Final

import horovod.torch as hvd
import torch
from torch import nn

from bytesched.config import Config
from bytesched.environment import horovod_autotunes, is_horovod_elastic
from bytesched.errors import PluginError
from bytesched.log import show
from bytesched.trace.timeline import observers_of

from ..agree import statements
from ..planned.beginning import add_optimizer, stays_plain, why_whole
from ..planned.bundles import Slot
from ..planned.coding import DTYPES
from ..planned.hooked_session import HookedSession
from ..planned.terms import Terms, setting_of
from .around import Elastic, watch_endings
from .entry import Entry, decline
from .hvd_wire import HorovodWire
from .shell import Shell

log = logging.getLogger("bytesched")

#: what Horovod can reduce
_DTYPES: Final = (torch.float16, torch.float32, torch.float64)

#: our compression for each of Horovod's
_COMPRESSIONS: Final = {hvd.Compression.none: "none", hvd.Compression.fp16: "fp16"}

#: of buckets and of chunks, where settings say nothing
_BUCKET_BYTES: Final = 1 << 20


def why_plain(optimizer: torch.optim.Optimizer, model: nn.Module, config: Config) -> str:
    """Why no gradients of ``optimizer`` can be scheduled, on any rank of it; empty if some can."""
    if not hvd.is_initialized():
        raise PluginError("Horovod is not initialized: call hvd.init() first")
    shell: Any = optimizer
    if not hasattr(shell, "process_set"):
        return "Adasum combines updates, not gradients: they cannot be partitioned"
    if not shell.process_set.included():
        return f"this rank is not in the optimizer's process set {shell.process_set.ranks}"
    if shell.process_set.size() == 1:
        return "there is one rank"
    if shell.op not in (hvd.Average, hvd.Sum):
        return "gradients are neither averaged nor summed"
    if shell._compression not in _COMPRESSIONS:
        return f"{shell._compression.__name__} may need a tensor as a whole"
    if horovod_autotunes():
        return "HOROVOD_AUTOTUNE is on, and would tune against our own sizes"
    if config.compression == "bf16":
        return "Horovod cannot reduce bf16"
    if not _slots(optimizer, model):
        return "none of the model's parameters is reduced by this optimizer in dense form"
    return ""


def begin(
    optimizer: torch.optim.Optimizer, model: nn.Module, config: Config
) -> HookedSession | Elastic | None:
    """What stands behind the wrapped optimizer; None if it stays as it was. Collective."""
    if config.enabled and is_horovod_elastic():
        return Elastic(optimizer, model, partial(_begin, config=config))
    return _begin(optimizer, model, config)


def _begin(
    optimizer: torch.optim.Optimizer, model: nn.Module, config: Config
) -> HookedSession | None:
    show(config.log_level, hvd.rank() if hvd.is_initialized() else 0)
    why = why_plain(optimizer, model, config) if config.enabled else "enabled is off"
    if stays_plain(f"Horovod's {type(optimizer).__name__}", why):
        decline(optimizer, why)
        return None
    with Entry(vars(optimizer)["process_set"], config.timeout_s) as entry:
        kind = updating_class(optimizer)
        why = why_whole(model, optimizer, kind, config)
        session = attach(optimizer, model, config, entry)
        try:
            add_optimizer(session, optimizer, kind, why)
            # From here on they train together, so none of them may be left behind.
            entry.agree([])
        except BaseException:
            session.close()
            raise
    return session


def updating_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The user's class: Horovod's is made on the fly, right beneath it."""
    return type(optimizer).__bases__[0]


def attach(
    optimizer: torch.optim.Optimizer, model: nn.Module, config: Config, entry: Entry
) -> HookedSession:
    """A session for ``optimizer``; collective over its process set, whose ranks go by ``entry``."""
    shell: Any = optimizer
    if config.compression == "none":
        config = replace(config, compression=_COMPRESSIONS[shell._compression])
    slots = _slots(optimizer, model)
    entry.agree(
        [
            *statements(slots, optimizer, config),
            f"op = {shell.op}",
            f"gradient_predivide_factor = {shell.gradient_predivide_factor}",
            f"backward_passes_per_step = {shell.backward_passes_per_step}",
        ]
    )
    wire = HorovodWire(
        shell.process_set,
        average=shell.op == hvd.Average,
        # Horovod does not apply it to groups.
        predivide=1.0 if shell._groups is not None else shell.gradient_predivide_factor,
        name=entry.name,
        timeout_s=config.timeout_s,
        device=slots[0].parameter.device,
        dtype=DTYPES.get(config.compression),
    )
    terms = Terms(
        slots,
        config,
        wire,
        observers_of(wire, config),
        setting_of(config, _BUCKET_BYTES),
        divisor=1,
        carrier="horovod",
    )
    session = HookedSession(model, terms, sync=None, find_unused=False)
    wire.follow(session.source)
    session.on_close(Shell(shell, session, slots, wire, updating_class(optimizer)).take_over())
    session.on_close(watch_endings(session, config.timeout_s, tunes=config.tune))
    session.on_close(partial(_leave, session, wire))
    return session


def _leave(session: HookedSession, wire: HorovodWire) -> None:
    """``session`` ends: other ranks hear of it if they wait for gradients of this one."""
    if session.is_inside_round:
        log.warning(
            "rank %d unwraps inside a backward pass or a step(): the others, which wait for its "
            "gradients, fail",
            wire.rank,
        )
        wire.abort()


def _slots(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Slot]:
    """What is reduced as dense chunks; the rest stays with Horovod."""
    reduced = {id(p) for p in vars(optimizer)["_requires_update"]}
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    return [
        Slot(name, parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) in reduced
        and id(parameter) not in sparse
        and type(parameter) is nn.Parameter
        and parameter.numel()
        and parameter.dtype in _DTYPES
    ]
