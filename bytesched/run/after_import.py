"""Functions that are called as soon as a certain module has been imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["Action", "after_import"]

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
