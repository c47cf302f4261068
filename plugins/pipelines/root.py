"""The stages of one rank as one model, of which a step of the schedule is the forward pass.

Stages are reduced where a schedule says that their gradients are complete, which it does to the
stage itself (``perform_reduce_grad``), whatever its kind. Hooks of parameters would not do: where
weight gradients are computed apart (the action W), ``torch.autograd.grad`` calls none of them.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from bytesched.errors import PluginError

from .private import SCHEDULES, base_class, probe_schedule, stages_of


def schedule_of(modules: Sequence[nn.Module]) -> object | None:
    """The schedule of this process that runs ``modules``, if it is one; None if there is none.

    Raises `PluginError` if only some of its stages are among them, or some of them are no stages,
    or there are several.
    """
    found = [s for s in _alive() if _modules_of(s) & _ids(modules)]
    if not found:
        return None
    if len(found) > 1:
        # One of them may be garbage.
        gc.collect()
        found = [s for s in found if any(s is other for other in gc.get_objects())]
        names = ", ".join(type(schedule).__name__ for schedule in found)
        if len(found) > 1:
            raise PluginError(
                f"these stages are in {len(found)} schedules ({names}): wrap the one that trains"
            )
    only: object = found[0]
    inner = _modules_of(only)
    if inner != _ids(modules):
        raise PluginError(
            f"{type(only).__name__} has {len(inner)} stages on this rank, and {len(modules)} "
            "modules were given: wrap the schedule itself, or all modules of its stages"
        )
    return only


class Schedule:
    """One schedule of this rank. Raises `PluginError` if this torch lacks what is read of it."""

    def __init__(self, schedule: Any) -> None:
        self.name = type(schedule).__name__
        self._schedule = schedule
        probe_schedule(schedule)
        #: those of this rank, as torch has them
        self.stages: list[Any] = stages_of(schedule)

    @property
    def trains(self) -> bool:
        """Whether the step that begins has backward passes."""
        return bool(self._schedule._has_backward)

    @property
    def order(self) -> object | None:
        """What says when each action comes; another object if the schedule gets another order."""
        return getattr(self._schedule, "pipeline_order_with_comms", None)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of this pipeline."""
        group: dist.ProcessGroup | None = self.stages[0].group
        return group if group is not None else distributed_c10d._get_default_group()

    def statements(self) -> list[str]:
        """What has to be the same on all ranks of all pipelines, a line for each."""
        order: Any = self.order
        rows = [] if order is None else [[str(a) for a in row] for _, row in sorted(order.items())]
        digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]
        return [
            f"{self.name} of {self.stages[0].num_stages} stages",
            f"{self._schedule._n_microbatches} micro-batches",
            f"an order of {len(rows)} ranks with digest {digest}",
        ]

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart (W), so that no hook is called."""
        return any(action.computation_type.value == "W" for action in self._actions())

    def unreduced(self) -> list[int]:
        """The stages that the order never reduces."""
        if self.order is None:
            return []
        actions = [a for a in self._actions() if a.computation_type.value == "REDUCE_GRAD"]
        reduced = {action.stage_index for action in actions}
        return [stage.stage_index for stage in self.stages if stage.stage_index not in reduced]

    def set_step(self, step: Callable[..., Any] | None) -> Callable[..., Any]:
        """``step`` is called in place of what was, which is returned; None: the schedule's own."""
        before: Callable[..., Any] = self._schedule.step
        if step is None:
            vars(self._schedule).pop("step", None)
        else:
            self._schedule.step = step
        return before

    def _actions(self) -> Iterator[Any]:
        order: Any = self.order
        for action in order[self._schedule.rank] if order else ():
            yield from getattr(action, "sub_actions", None) or (action,)


def _modules_of(schedule: Any) -> Set[int]:
    return {id(getattr(stage, "submod", None)) for stage in stages_of(schedule)}


def _ids(modules: Sequence[nn.Module]) -> Set[int]:
    return {id(module) for module in modules}


def _alive() -> list[Any]:
    kind = base_class()
    if kind is None:
        return []
    # Not isinstance: it reads the class of proxies of all kinds.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


class StageModules(nn.Module):
    """The modules of a rank's stages, by the stage's number; a call is one step of the schedule.

    So everything that hooks a model hooks a pipeline. The schedule keeps it alive.
    """

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        # Behind a tuple: none of it is a submodule, and the stages' own modules are.
        self._schedule = (schedule,)
        self._step: Callable[..., Any] | None = None
        for stage in schedule.stages:
            module = stage.submod
            inner = module.module if isinstance(module, DistributedDataParallel) else module
            self.add_module(f"stage{stage.stage_index}", inner)

    @property
    def schedule(self) -> Schedule:
        return self._schedule[0]

    def ddps(self) -> list[DistributedDataParallel]:
        """The stages that DDP wraps, as long as they run in it."""
        modules = [stage.submod for stage in self.schedule.stages]
        return [module for module in modules if isinstance(module, DistributedDataParallel)]

    def use(self, step: Callable[..., Any]) -> None:
        """A call is ``step`` from now on, in place of the schedule's own, which it gets first."""
        self._step = partial(step, self.schedule.set_step(_Called(self)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One step of the schedule."""
        if self._step is None:
            raise PluginError("this pipeline is not wrapped")
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
    if SCHEDULES not in sys.modules:
        return model
    schedule = model if any(k.__module__ == SCHEDULES for k in type(model).__mro__) else None
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
