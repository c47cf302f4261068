"""An unchanged script: what it makes is seen here, and wrapped as soon as that is possible.

A DistributedDataParallel is seen when it is made, and then the optimizers that step over its
parameters; an optimizer of Horovod's is seen when it is made, and then the module around its
parameters that is called. All ranks decide alike, at the same moment, as they run the same script.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from bytesched.environment import is_horovod_elastic
from bytesched.errors import BytesschedError, in_one_line

from .. import wrap_found
from ..ending import at_exit, not_at_exit
from ..left import left, summary
from ..pipelines.root import StageModules, staged
from ..registry import before_wrap, ended, is_wrapped
from .kinds import WatchedDdp, WatchedHorovod
from .owners import parameter_ids
from .watched import Watched, say

log = logging.getLogger("bytesched")

_models: list[Watched] = []
#: schedules of pipelines that were looked at
_seen: WeakSet[Any] = WeakSet()


def _none() -> None:
    return None


#: the optimizer whose step() is running, or has raised; those that it steps itself do not count
_stepping: Callable[[], torch.optim.Optimizer | None] = _none


def ddp_made(ddp: Any, module: nn.Module) -> None:
    """A DistributedDataParallel of ``module`` is under construction."""
    if not any(isinstance(model, WatchedDdp) and model.ddp() is ddp for model in _models):
        _watch(WatchedDdp(ddp, module), parameter_ids(module))


def horovod_optimizer_made(optimizer: torch.optim.Optimizer) -> None:
    """``hvd.DistributedOptimizer`` has returned ``optimizer``."""
    model = WatchedHorovod(optimizer)
    _watch(model, model.parameters())
    if is_horovod_elastic():
        model.arm()


def pipeline_steps(schedule: Any) -> None:
    """A schedule of torch.distributed.pipelining is about to make a step.

    In the first one, DDPs that its stages are in reduce nothing any more, or are left as they were.
    """
    if schedule in _seen or not torch.is_grad_enabled():
        return
    try:
        root = staged(schedule)
        if not isinstance(root, StageModules) or not root.schedule.trains:
            return
        _seen.add(schedule)
        ddps = root.ddps()
        if ddps:
            _wrap(root)
    except Exception as error:
        log.debug("%s could not be wrapped", type(schedule).__name__, exc_info=True)
        _leave(type(schedule).__name__, in_one_line(error))
        return
    for model in _models:
        if isinstance(model, WatchedDdp) and any(model.ddp() is ddp for ddp in ddps):
            model.close()


def _watch(model: Watched, parameters: set[int]) -> None:
    for other in _models:
        if parameters & other.parameters():
            other.give_back(parameters)
            other.close()
    _models[:] = [other for other in _models if not other.is_closed]
    _models.append(model)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    global _stepping
    if torch.compiler.is_compiling() or _is_inside(_stepping(), optimizer):
        return
    _stepping = ref(optimizer)
    for model in _models:
        if not model.is_closed:
            model.before_step(optimizer)


def _is_inside(other: torch.optim.Optimizer | None, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook of ``step()`` of ``optimizer`` is inside ``step()`` of ``other``."""
    if other is None or other is optimizer:
        return False
    # Of torch, around each step(): of one that has raised nothing else tells.
    around = sys._getframe(2)
    frame = around.f_back
    while frame is not None:
        if frame.f_code is around.f_code and frame.f_locals.get("self") is other:
            return True
        frame = frame.f_back
    return False


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    global _stepping
    if not torch.compiler.is_compiling() and _stepping() is optimizer:
        _stepping = _none


def _script_wraps(optimizer: Any, model: Any) -> None:
    """Before a ``wrap`` of the script's own, which from now on is all that counts."""
    for watched in _models:
        if watched.is_about(optimizer, model):
            watched.give_back(watched.parameters())
            watched.close()


def _at_exit() -> None:
    """After that of the registry, which is registered later."""
    not_at_exit(_at_exit)
    say_undecided()
    for line in summary(ended(), left()):
        log.info("%s", line)


def say_undecided() -> None:
    """Says why models were left as they were about which nothing was decided."""
    for model in _models:
        model.say_if_undecided()


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


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
before_wrap.append(_script_wraps)
at_exit(_at_exit)
