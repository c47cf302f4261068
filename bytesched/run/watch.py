"""The places at which an unchanged script is noticed: where it makes what `wrap` is for.

Nothing of the script is imported earlier than by the script, and no framework for its sake.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from bytesched.run.after_import import Action, after_import
from bytesched.run.urgent_calls import mark_all_to_alls

__all__ = ["noticed_something", "watch"]

_INTERCEPT = "bytesched.plugins.script.intercept"


def watch(also: Mapping[str, Action] = MappingProxyType({})) -> None:
    """Notice, from now on, every DistributedDataParallel, pipeline and Horovod optimizer.

    The same goes for processes that `multiprocessing` or `horovod.run` starts afresh.

    Args:
        also: what to call, in this process alone, after the import of other modules.
    """
    after_import(
        {
            **also,
            "torch.distributed.distributed_c10d": mark_all_to_alls,
            "torch.distributed.pipelining.schedules": _watch_pipelines,
            "torch.nn.modules.module": _watch_ddp,
            "horovod.torch.optimizer": _watch_horovod,
            "horovod.runner": _watch_horovod_run,
            "multiprocessing.spawn": _watch_children,
        }
    )


def noticed_something() -> bool:
    """Return whether the script has made anything that could be wrapped."""
    return _INTERCEPT in sys.modules


def _watch_ddp(module: Any) -> None:
    def registered(owner: Any, name: str, child: Any) -> None:
        # The statement self.module = module in the constructor: there is no later hook.
        if name != "module":
            return
        distributed = sys.modules.get("torch.nn.parallel.distributed")
        if distributed and issubclass(type(owner), distributed.DistributedDataParallel):
            importlib.import_module(_INTERCEPT).ddp_made(owner, child)

    module.register_module_module_registration_hook(registered)


def _watch_pipelines(module: Any) -> None:
    for kind in (module.PipelineScheduleSingle, module.PipelineScheduleMulti):
        kind.step = _first_announced(kind.step)


def _first_announced(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        # What is wrapped has a step of its own, which ends up here again.
        if "step" not in vars(schedule):
            importlib.import_module(_INTERCEPT).pipeline_steps(schedule)
            if "step" in vars(schedule):
                return schedule.step(*args, **kwargs)
        return own(schedule, *args, **kwargs)

    return step


def _watch_horovod(module: Any) -> None:
    make = module.DistributedOptimizer

    @functools.wraps(make)
    def DistributedOptimizer(*args: Any, **kwargs: Any) -> Any:
        try:
            optimizer = make(*args, **kwargs)
        except BaseException as error:
            # A bare raise adds no frame: this one shall not show.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise
        importlib.import_module(_INTERCEPT).horovod_optimizer_made(optimizer)
        return optimizer

    module.DistributedOptimizer = DistributedOptimizer
    package: Any = sys.modules.get("horovod.torch")
    if getattr(package, "DistributedOptimizer", None) is make:
        # It was imported before we were asked to watch.
        package.DistributedOptimizer = DistributedOptimizer


def _watch_horovod_run(module: Any) -> None:
    start = module.run

    @functools.wraps(start)
    def run(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return start(_Watching(func), *args, **kwargs)

    module.run = run


class _Watching:
    """A function that, pickled and called in another process, is watched there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:
        # In this order: what the function refers to is imported while it is unpickled.
        return _second, (_Watcher(), self._function)


def _second(_: object, function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _watch_children(module: Any) -> None:
    prepare = module.get_preparation_data

    @functools.wraps(prepare)
    def get_preparation_data(name: str) -> dict[str, Any]:
        # The child unpickles all of it before it imports the script, and ignores this entry.
        return {**prepare(name), "bytesched": _Watcher()}

    module.get_preparation_data = get_preparation_data


class _Watcher:
    """Unpickled in another process, it watches there."""

    def __reduce__(self) -> Any:
        return watch, ()
