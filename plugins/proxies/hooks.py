"""Hooks that wait before a module is called, and that its copies and pickles leave behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .compiling import is_exporting


class StayingHook:
    """A forward pre-hook that stays behind when its module is copied or pickled.

    In its place goes ``{}.get``, which returns the arguments of the call as they are, and which
    needs no bytesched where the pickle is loaded.
    """

    def __init__(
        self, call: Callable[[nn.Module, Any], None], traced: Callable[[], None] | None = None
    ) -> None:
        self._call = call
        self._traced = traced

    def __call__(self, module: nn.Module, args: Any) -> None:
        if is_exporting():
            # It is no part of what torch.export makes, and no forward pass is taken.
            return
        if torch.compiler.is_dynamo_compiling():
            self._break(module, args)
        else:
            self._call(module, args)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _break(self, module: nn.Module, args: Any) -> None:
        """Inside compiled code: a graph break, after which the call is an ordinary one."""
        if self._traced is not None:
            self._traced()
        self._call(module, args)

    def __reduce__(self) -> Any:
        return partial, ({}.get,)


class StayingForwardHook:
    """The same for a hook after the forward pass; where it is loaded, bytesched is needed."""

    def __init__(self, call: Callable[[nn.Module, Any, Any], None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._call(module, args, output)

    def __reduce__(self) -> Any:
        return StayingForwardHook, (_nothing,)


def _nothing(module: nn.Module, args: Any, output: Any) -> None:
    pass


def gate(
    module: nn.Module, wait: Callable[[nn.Module], None], traced: Callable[[], None]
) -> Callable[[], None]:
    """Makes every call of ``module`` call ``wait`` first; returns what takes it off again.

    ``traced`` is called if the module turns out to run inside compiled code.
    """
    compiled = module.__dict__.get("_compiled_call_impl")
    if compiled is not None:
        # Its own hooks run inside the compiled code: wait in front of that.
        def call(*args: Any, **kwargs: Any) -> Any:
            wait(module)
            return compiled(*args, **kwargs)

        module._compiled_call_impl = call
        weak: list[weakref.ref[Any]] = [weakref.ref(one) for one in (module, call, compiled)]

        def take_off() -> None:
            module, call, compiled = (one() for one in weak)
            # Another gate or nothing may be in its place by now.
            if module is not None and call and vars(module).get("_compiled_call_impl") is call:
                module._compiled_call_impl = compiled

        return take_off

    hook = StayingHook(lambda module, args: wait(module), traced)
    return module.register_forward_pre_hook(hook, prepend=True).remove
