"""Whether a known optimizer is what its package says: nobody has put other code in its place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final

import torch

__all__ = ["why_altered"]

#: whose functions a package may use beside its own
_TRUSTED: Final = sys.stdlib_module_names | {"torch", "typing_extensions"}

#: what a ``step()`` does not call on itself
_BESIDE: Final = frozenset(name for name in vars(torch.optim.Optimizer) if name[0] != "_")


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
