"""What an optimizer's ``step()`` runs, and whether that is what its package says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from operator import is_, methodcaller
from types import FunctionType, MethodType
from typing import Any, Final

import torch

from bytesched.errors import PluginError

#: what ``Optimizer.__init__`` gives an instance for its hooks
HOOKS: Final = tuple(
    f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)


def _nothing() -> None:
    pass


#: of torch's wrapper around every ``step`` that runs hooks
_HOOKED_CODE: Final = torch.optim.Optimizer.profile_hook_step(_nothing).__code__


def is_hooked(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether ``kind.step`` is what runs the hooks of an optimizer, and nobody has replaced it."""
    return getattr(kind.step, "__code__", None) is _HOOKED_CODE


def raw_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """``kind.step`` without the hooks that torch runs around it."""
    step: Any = kind.step
    raw: Callable[..., Any] = step.__wrapped__ if is_hooked(kind) else step
    return raw


def stepping_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose hooks see every step over the parameters of ``optimizer``.

    A shell, as trainers put around an optimizer, has no hooks of its own, or does more than one
    step of the optimizer in it. Raises `PluginError` for one without an optimizer in it.
    """
    seen = {id(optimizer)}
    while (inside := _inside(optimizer)) is not None and id(inside) not in seen:
        optimizer = inside
        seen.add(id(optimizer))
    own = vars(optimizer)
    missing = [name for name in ("state", "param_groups", *HOOKS) if name not in own]
    if missing or not hasattr(type(optimizer).step, "hooked"):
        raise PluginError(
            f"{type(optimizer).__name__} never called Optimizer.__init__, and holds no optimizer "
            "over all of its parameters: wrap what it delegates to"
        )
    return optimizer


def _inside(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """An optimizer that is an attribute of ``optimizer``, over all of its parameters."""
    mine = _parameter_ids(optimizer)
    for value in vars(optimizer).values():
        # Not isinstance: it reads the class of proxies of all kinds.
        if issubclass(type(value), torch.optim.Optimizer) and mine <= _parameter_ids(value):
            return value  # type: ignore[no-any-return]
    return None


def _parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())
    return {id(parameter) for group in groups for parameter in group["params"]}


#: whose functions a package may use beside its own
_TRUSTED: Final = sys.stdlib_module_names | {"torch", "typing_extensions"}

#: of a mapping, without a call of Python
_VALUES: Final = methodcaller("values")
#: what a ``step()`` does not call on itself
_BESIDE: Final = frozenset(name for name in vars(torch.optim.Optimizer) if name[0] != "_")


class Code:
    """What an update by ``kind`` may call, as it is now: a change of it is seen in each step.

    Args:
        optimizer: not kept alive, nor is what it alone has.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> None:
        classes = [each for each in kind.__mro__ if issubclass(each, torch.optim.Optimizer)]
        # A script, in which some classes are, gives its names other values all the time.
        names = {each.__module__ for each in classes} - {"__main__"}
        modules = [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]
        self._places = [*map(vars, classes), *modules]
        self._own: list[int] = []
        self._shared: list[Any] = []
        self.has_changed(optimizer)

    def has_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is not what it was when this was last called."""
        own, shared = self._own, self._shared
        mine = vars(optimizer).items()
        self._own = [id(value) for name, value in mine if callable(value) and name not in _BESIDE]
        self._shared = [*chain.from_iterable(map(_VALUES, self._places))]
        is_same = own == self._own and len(shared) == len(self._shared)
        return not (is_same and all(map(is_, shared, self._shared)))


def why_altered(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """Why ``optimizer`` does not do what is written in the class ``kind``; empty if it does."""
    own = vars(optimizer)
    classes = [each for each in kind.__mro__ if issubclass(each, torch.optim.Optimizer)]
    for name in {name for each in classes for name in vars(each)} - _BESIDE:
        if name in own and callable(own[name]):
            return f"{name} of this {kind.__name__} has been replaced"
    # torch's own classes call no attribute; those of others choose one of their module.
    is_chosen = _owner(kind) != "torch"
    for name, value in own.items():
        if is_chosen and isinstance(value, FunctionType) and name not in _BESIDE:
            module = value.__globals__.get("__name__")
            if module != kind.__module__:
                return f"{name} of this {kind.__name__} is a function of another module, {module}"
    for each in classes:
        module = each.__module__
        for where, names in ((each.__name__, vars(each)), (module, vars(sys.modules[module]))):
            for name, value in tuple(names.items()):
                if isinstance(value, (staticmethod, classmethod)):
                    value = value.__func__
                if not _TRUSTED.union((_owner(each),)).issuperset(map(_package, _layers(value))):
                    return f"{where}.{name} has been replaced"
    return ""


def _owner(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _layers(value: Any) -> Iterator[FunctionType]:
    """A function, and what it is wrapped around."""
    while isinstance(value, (FunctionType, MethodType, partial)):
        if isinstance(value, partial):
            value = value.func
        elif isinstance(value, MethodType):
            value = value.__func__
        else:
            yield value
            value = getattr(value, "__wrapped__", None)


def _package(function: FunctionType) -> str:
    """Of the code, which no decorator can rename."""
    return str(function.__globals__.get("__name__")).partition(".")[0]
