"""Whether a known optimizer is what its package says: nobody has put other code in its place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from operator import is_, methodcaller
from types import FunctionType, MethodType
from typing import Any, Final

import torch

__all__ = ["Code", "why_altered"]

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
        for where, names in ((each.__name__, vars(each)), (each.__module__, _module_of(each))):
            for name, value in tuple(names.items()):
                if isinstance(value, (staticmethod, classmethod)):
                    value = value.__func__
                if not _TRUSTED.union((_owner(each),)).issuperset(map(_package, _layers(value))):
                    return f"{where}.{name} has been replaced"
    return ""


def _owner(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _module_of(kind: type) -> dict[str, Any]:
    return vars(sys.modules[kind.__module__])


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
