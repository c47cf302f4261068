"""How a session begins on any carrier: its parameters, and whether it crosses the barrier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from typing import TypeVar

import torch
from torch import nn

from bytesched.config import Config
from bytesched.errors import PluginError

from ..left import leave
from ..proxies.compiling import exclude_compiler, has_compiled
from ..update.separable import why_not_deferred
from .bundles import Slot
from .session import PlannedSession

log = logging.getLogger("bytesched")


SlotT = TypeVar("SlotT", bound=Slot)


def stays_plain(name: str, why: str) -> bool:
    """Whether there is a reason ``why`` to leave what has this ``name`` as it was; it is logged."""
    if why:
        leave(name, why)
    return bool(why)


def slots_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ignored: Container[int] = (),
    is_whole: bool = False,
    kind: Callable[[str, nn.Parameter], SlotT],
) -> list[SlotT]:
    """All parameters of ``model`` that require a gradient, on one device, in its own order.

    Args:
        optimizer: of some of them at least.
        ignored: ids of parameters that are left out.
        is_whole: others are there, too, as far as their use can be waited for.
        kind: what is made for each of the others.

    Raises `PluginError` for a model or an optimizer that is not so.
    """
    slots = []
    for name, parameter in model.named_parameters():
        is_wanted = is_whole or (parameter.requires_grad and parameter.numel())
        if not is_wanted or id(parameter) in ignored:
            continue
        if type(parameter) is nn.Parameter:
            slots.append(kind(name, parameter))
        elif parameter.requires_grad:
            raise PluginError(
                f"parameter {name!r} is a {type(parameter).__name__}, not a plain Parameter"
            )
    if not slots:
        raise PluginError("the model has no parameter that requires a gradient")
    devices = {slot.parameter.device for slot in slots if slot.parameter.requires_grad}
    if len(devices) > 1:
        raise PluginError(f"parameters are on several devices: {sorted(map(str, devices))}")
    managed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(slot.parameter) in managed for slot in slots):
        raise PluginError("the optimizer has no parameter of this model that requires a gradient")
    return slots


def why_whole(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    kind: type[torch.optim.Optimizer],
    config: Config,
    *,
    carried: str = "",
) -> str:
    """Why ``step()`` updates everything at once, in front of the barrier; empty if it need not.

    Args:
        kind: the class whose ``step()`` does the update.
        carried: a reason that lies in the carrier of the gradients, or nothing.
    """
    if not config.cross_barrier:
        return "cross_barrier is off"
    if carried:
        return carried
    if not exclude_compiler() and has_compiled(model):
        return f"torch {torch.__version__} has no lock that keeps its compiler out"
    return why_not_deferred(optimizer, kind)


def add_optimizer(
    session: PlannedSession,
    optimizer: torch.optim.Optimizer,
    kind: type[torch.optim.Optimizer],
    why: str,
) -> None:
    """Updates of ``optimizer`` cross the barrier from now on, unless there is a reason ``why`` not.

    Raises `PluginError` if they cannot be the session's.
    """
    if why:
        log.info("scheduling inside backward, stepping whole: %s", why)
        session.steps_whole(why)
    session.add_optimizer(optimizer, kind, cross=not why)
