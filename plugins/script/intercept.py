"""An unchanged script: what it makes is seen here, and wrapped as soon as that is possible.

A DistributedDataParallel is seen when it is made, and then the optimizers that step over its
parameters; an optimizer of Horovod's is seen when it is made, and then the module around its
parameters that is called. All ranks decide alike, at the same moment, as they run the same script.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from bytesched.environment import is_horovod_elastic

from ..ending import at_exit, not_at_exit
from ..left import left
from ..registry import before_wrap, ended
from .kinds import WatchedDdp, WatchedHorovod
from .owners import parameter_ids
from .pipelines import begin_step
from .summary import summary
from .watched import Watched

log = logging.getLogger("bytesched")

_models: list[Watched] = []


def _none() -> None:
    return None


#: the optimizer whose step() is running; those that it steps itself do not count
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
    """A schedule of torch.distributed.pipelining is about to make a step."""
    for ddp in begin_step(schedule):
        for model in _models:
            if isinstance(model, WatchedDdp) and model.ddp() is ddp:
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
    if torch.compiler.is_compiling() or _stepping() not in (None, optimizer):
        return
    _stepping = ref(optimizer)
    for model in _models:
        if not model.is_closed:
            model.before_step(optimizer)


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
    if not hasattr(sys, "last_value"):
        say_undecided()
        for line in summary(ended(), left()):
            log.info("%s", line)


def say_undecided() -> None:
    """Says why models were left as they were about which nothing was decided."""
    for model in _models:
        model.say_if_undecided()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
before_wrap(_script_wraps)
at_exit(_at_exit)
