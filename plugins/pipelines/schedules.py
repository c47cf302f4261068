"""What is read of a schedule of torch.distributed.pipelining, and which one runs some modules.

Stages are reduced where a schedule says that their gradients are complete, which it does to the
stage itself (``perform_reduce_grad``), whatever its kind. Hooks of parameters would not do: where
weight gradients are computed apart (the action W), ``torch.autograd.grad`` calls none of them.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from bytesched.errors import PluginError

from .private import SCHEDULES, base_class, probe_schedule, stages_of


def is_schedule(x: object) -> bool:
    """Whether ``x`` is a schedule of torch.distributed.pipelining."""
    return any(kind.__module__ == SCHEDULES for kind in type(x).__mro__)


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
    inner = _modules_of(found[0])
    if inner != _ids(modules):
        raise PluginError(
            f"{type(found[0]).__name__} has {len(inner)} stages on this rank, and {len(modules)} "
            "modules were given: wrap the schedule itself, or all modules of its stages"
        )
    only: object = found[0]
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

    def set_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step`` is called in place of the schedule's own, which is returned."""
        own: Callable[..., Any] = self._schedule.step
        self._schedule.step = step
        return own

    def reset_step(self) -> None:
        """The schedule's own ``step`` is called again."""
        vars(self._schedule).pop("step", None)

    def _actions(self) -> Iterator[Any]:
        order: Any = self.order
        for action in order[self._schedule.rank] if order else ():
            yield from getattr(action, "sub_actions", None) or (action,)


def _submodule(stage: Any) -> object:
    return getattr(stage, "submod", None)


def _modules_of(schedule: Any) -> Set[int]:
    return {id(_submodule(stage)) for stage in stages_of(schedule)}


def _ids(modules: Sequence[nn.Module]) -> Set[int]:
    return {id(module) for module in modules}


def _alive() -> list[Any]:
    kind = base_class()
    if kind is None:
        return []
    # Not isinstance: it reads the class of proxies of all kinds.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
