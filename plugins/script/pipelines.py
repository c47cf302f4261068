"""A pipeline of an unchanged script whose stages are in DDP: wrapped before its first step."""

from __future__ import annotations

import gc
import logging
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bytesched.errors import BytesschedError, in_one_line

from .. import wrap_found
from ..pipelines.root import StageModules, staged
from ..registry import is_wrapped
from .owners import parameter_ids
from .watched import say

log = logging.getLogger("bytesched")

_seen: WeakSet[Any] = WeakSet()


def begin_step(schedule: Any) -> list[DistributedDataParallel]:
    """``schedule`` is about to make a step, its first if the answer is not empty.

    Returns the DDPs that its stages are in: they reduce nothing any more, or are left as they were.
    """
    if schedule in _seen or not torch.is_grad_enabled():
        return []
    try:
        root = staged(schedule)
        if not isinstance(root, StageModules) or not root.schedule.trains:
            return []
        _seen.add(schedule)
        ddps = root.ddps()
        if ddps:
            _wrap(root)
    except Exception as error:
        log.debug("%s could not be wrapped", type(schedule).__name__, exc_info=True)
        _leave(type(schedule).__name__, in_one_line(error))
        return []
    return ddps


def _wrap(root: StageModules) -> None:
    name = f"{root.schedule.name} of stages in DistributedDataParallel"
    optimizers = _optimizers(root)
    why = ""
    if not optimizers:
        why = "no optimizer of its parameters was there when its first step began"
    elif len(set().union(*map(parameter_ids, optimizers))) < sum(
        len(parameter_ids(optimizer)) for optimizer in optimizers
    ):
        why = f"{len(optimizers)} optimizers share its parameters"
    if why:
        if root.schedule.splits_backward:
            why += "; DDP reduces none of its weight gradients, which are computed apart"
        _leave(name, why)
        return
    for optimizer in optimizers:
        try:
            wrap_found(optimizer, root)
        except BytesschedError as error:
            _leave(name, str(error))
            return
        if is_wrapped(optimizer):
            log.info("%s: wrapped its optimizer, %s", name, type(optimizer).__name__)


def _optimizers(root: StageModules) -> list[torch.optim.Optimizer]:
    """All that update parameters of the stages."""
    mine = parameter_ids(root)
    # Not isinstance: it reads the class of proxies of all kinds.
    alive = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
    return [o for o in alive if "param_groups" in vars(o) and mine & parameter_ids(o)]


def _leave(name: str, why: str) -> None:
    say(name, why, dist.get_rank(), logging.WARNING)
