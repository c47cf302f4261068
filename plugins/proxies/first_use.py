"""Who uses which parameter first: learned in one iteration, then guarded in all others.

A parameter is the gate of its own update (pending.py), but does not see readers that are compiled:
a custom autograd.Function over a kernel, a compiled module. So a forward pre-hook waits as well, on
the nearest module around the parameter that is really called.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .compiling import is_compiled
from .hooks import StayingHook
from .pending import hold, is_held, release


class FirstUse:
    """Watches one forward pass of ``root``: order of first use, and which modules are called.

    Modules are known by their ids and not kept alive: the user may drop them at any time.
    """

    def __init__(self, root: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._moment = 0
        self._touched: dict[int, int] = {}
        #: module -> when it was called first
        self._called: dict[int, int] = {}
        self._handles: list[RemovableHandle] = []
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        #: module -> its parent, for the first path that leads there
        self._parents: dict[int, int | None] = {}
        #: parameter id -> the modules that own it
        self._owners: dict[int, list[int]] = {}
        self._compiled: set[int] = set()
        self._names = {id(module): name for name, module in root.named_modules()}
        self._visit(root, None, inside_compiled=False)

    def _visit(self, module: nn.Module, parent: int | None, *, inside_compiled: bool) -> None:
        key = id(module)
        if key in self._parents:
            return
        self._parents[key] = parent
        self._modules[key] = weakref.ref(module)
        inside_compiled = inside_compiled or isinstance(module, torch.jit.ScriptModule)
        if inside_compiled:
            self._compiled.add(key)
        else:
            hook = StayingHook(self._on_call)
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
        for parameter in module._parameters.values():
            if parameter is not None:
                self._owners.setdefault(id(parameter), []).append(key)
        inside_compiled = inside_compiled or is_compiled(module)
        for child in module.children():
            self._visit(child, key, inside_compiled=inside_compiled)

    # -- watching ----------------------------------------------------------------------

    def begin(self) -> None:
        """The forward pass starts."""
        for parameter in self._parameters.values():
            seen_inside_compiled = all(
                self._runs_compiled(owner) for owner in self._owners.get(id(parameter), ())
            )
            if type(parameter) is nn.Parameter and not seen_inside_compiled:
                hold(parameter, partial(self._on_touch, parameter))

    def end(self) -> None:
        """The forward pass is over (or failed)."""
        for parameter in self._parameters.values() if self._handles else ():
            if is_held(parameter):
                release(parameter)

    def close(self) -> None:
        """Takes the hooks off."""
        self.end()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _runs_compiled(self, key: int) -> bool:
        if key in self._compiled:
            return True
        module = self._modules[key]()
        return module is not None and is_compiled(module)

    def _on_touch(self, parameter: nn.Parameter) -> None:
        self._moment += 1
        self._touched.setdefault(id(parameter), self._moment)
        release(parameter)

    def _on_call(self, module: nn.Module, args: Any) -> None:
        self._moment += 1
        self._called.setdefault(id(module), self._moment)

    # -- what was learned --------------------------------------------------------------

    def order(self) -> list[int]:
        """Indices of the parameters, by first use; unused ones last, as registered."""
        never = self._moment + 1
        keys = []
        for index, key in enumerate(self._parameters):
            moment = self._touched.get(key)
            if moment is None:
                callers = [self._called.get(m, never) for m in self._guardians(key)]
                moment = min(callers, default=never)
            keys.append((moment, index))
        return [index for _, index in sorted(keys)]

    def units(self) -> list[list[int]]:
        """The same, cut where another module's parameters begin."""
        units: list[list[int]] = []
        keys = list(self._parameters)
        owner: Sequence[int] = ()
        for index in self.order():
            owners = self._owners.get(keys[index], ())
            if not units or owners != owner:
                units.append([])
            owner = owners
            units[-1].append(index)
        return units

    def gates(self) -> Iterator[tuple[nn.Module, str, list[nn.Parameter]]]:
        """Each module that must wait when it is called, its name, and what it waits for.

        The owner waits, unless it is compiled code, where nothing waits. If it was not called (a
        ParameterList, the out_proj of MultiheadAttention), its nearest called ancestor waits too.
        """
        waits: dict[int, dict[int, nn.Parameter]] = {}
        for key, parameter in self._parameters.items():
            for owner in self._owners.get(key, ()):
                if owner not in self._compiled:
                    waits.setdefault(owner, {})[key] = parameter
            for guardian in self._guardians(key):
                waits.setdefault(guardian, {})[key] = parameter
        for module_key, parameters in waits.items():
            module = self._modules[module_key]()
            if module is not None:
                name = self._names[module_key] or type(module).__name__
                yield module, name, list(parameters.values())

    def _guardians(self, key: int) -> Iterator[int]:
        for owner in self._owners.get(key, ()):
            module: int | None = owner
            while module is not None and (module not in self._called or module in self._compiled):
                module = self._parents[module]
            if module is not None:
                yield module
