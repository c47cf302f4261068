"""The stages of one rank as one model, of which a step of the schedule is the forward pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.errors import PluginError

from .schedules import Schedule, is_schedule, schedule_of


class StageModules(nn.Module):
    """The modules of a rank's stages, by the stage's number; a call is one step of the schedule.

    So everything that hooks a model hooks a pipeline. The schedule keeps it alive.
    """

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        # Behind a tuple: none of it is a submodule, and the stages' own modules are.
        self._schedule = (schedule,)
        self._step: Callable[..., Any] = _unset
        for stage in schedule.stages:
            module = stage.submod
            inner = module.module if isinstance(module, DistributedDataParallel) else module
            self.add_module(f"stage{stage.stage_index}", inner)

    @property
    def schedule(self) -> Schedule:
        """The schedule that runs the stages."""
        return self._schedule[0]

    def ddps(self) -> list[DistributedDataParallel]:
        """The stages that DDP wraps, as long as they run in it."""
        modules = [stage.submod for stage in self.schedule.stages]
        return [module for module in modules if isinstance(module, DistributedDataParallel)]

    def use(self, step: Callable[..., Any]) -> None:
        """A call is ``step`` from now on, in place of the schedule's own, which it gets first."""
        own = self.schedule.set_step(_Called(self))

        def called(*args: Any, **kwargs: Any) -> Any:
            return step(own, *args, **kwargs)

        self._step = called

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One step of the schedule."""
        return self._step(*args, **kwargs)


class _Called:
    """What stands in a schedule in place of its ``step``."""

    def __init__(self, root: StageModules) -> None:
        self.root = root

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.root(*args, **kwargs)


def staged(model: Any) -> Any:
    """What stands for ``model``, if it is a pipeline: a schedule, or the modules of its stages.

    Anything else is returned as it is.
    """
    if "torch.distributed.pipelining.schedules" not in sys.modules:
        return model
    schedule = model if is_schedule(model) else None
    if schedule is None:
        modules = _modules(model)
        schedule = schedule_of(modules) if modules else None
    if schedule is None:
        return model
    step = vars(schedule).get("step")
    return step.root if isinstance(step, _Called) else StageModules(Schedule(schedule))


def _modules(model: Any) -> Sequence[nn.Module]:
    if isinstance(model, nn.ModuleList):
        return [model] if schedule_of([model]) is not None else list(model)
    if isinstance(model, nn.Module):
        return [model]
    if isinstance(model, (list, tuple)) and all(isinstance(m, nn.Module) for m in model):
        return list(model)
    return []


def _unset(*_: Any, **__: Any) -> Any:
    raise PluginError("this pipeline is not wrapped")
