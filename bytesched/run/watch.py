"""The places at which an unchanged script is noticed: where it makes what `wrap` is for.

Nothing of the script is imported earlier than by the script, and no framework for its sake.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any

from bytesched.run.urgent_calls import mark_all_to_alls

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


Action = Callable[[Any], None]


def after_import(actions: Mapping[str, Action]) -> None:
    """Call `actions[name](module)` once the module `name` is complete; now, if it already is."""
    awaited = dict(actions)
    for name in actions:
        if name in sys.modules:
            awaited.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Finder(awaited))


class _Finder(MetaPathFinder):
    """Finds what the other finders find, and has a word with the loader of awaited modules."""

    def __init__(self, awaited: dict[str, Action]) -> None:
        self._awaited = awaited
        #: names that the others are being asked for; one of them may ask all finders in turn
        self._asking: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._awaited or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec = find_spec(name)
        finally:
            self._asking.remove(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)
        return spec

    def _imported(self, module: ModuleType) -> None:
        self._awaited.pop(module.__name__)(module)


class _Loader(Loader):
    """Stands in for a loader until its module is executed; the module keeps the loader itself."""

    def __init__(self, loader: Loader, imported: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._imported = imported

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._imported(module)
