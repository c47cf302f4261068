"""torch.compile beside a thread that updates: the two exclude each other.

While torch compiles, ``torch.compiler.is_compiling()`` is true for every thread, and optimizers
then take other code paths, which round differently.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = [
    "exclude_compiler",
    "has_compiled",
    "is_compiled",
    "not_compiling",
    "settle_before_compiling",
]

#: Held by the compiler from the start of the outermost compilation to its end, and by each update.
not_compiling = threading.Lock()

_excluded = False
_compilations = 0
_settlers: list[Callable[[], None]] = []


def exclude_compiler() -> bool:
    """Makes compilations hold ``not_compiling``; False if this torch cannot tell of them."""
    global _excluded
    if _excluded:
        return True
    try:
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(_on_start)
        callback_handler.register_end_callback(_on_end)
    except (ImportError, AttributeError):
        return False
    _excluded = True
    return True


def settle_before_compiling(settle_all: Callable[[], None]) -> Callable[[], None]:
    """Calls ``settle_all`` whenever a compilation begins; returns what ends that.

    The compiler reads parameters; a pending one would wait for an update that waits for it.
    """
    _settlers.append(settle_all)
    return partial(_settlers.remove, settle_all)


def _on_start(*args: Any) -> None:
    global _compilations
    if not _compilations:
        # torch has raised its flag already; the updates that end now must not see it.
        flag = getattr(torch.compiler, "_is_compiling_flag", None)
        if flag is not None:
            torch.compiler._is_compiling_flag = False
        try:
            for settle_all in tuple(_settlers):
                settle_all()
        finally:
            not_compiling.acquire()
            if flag is not None:
                torch.compiler._is_compiling_flag = flag
    _compilations += 1


def _on_end(*args: Any) -> None:
    global _compilations
    _compilations -= 1
    if not _compilations:
        not_compiling.release()


def is_compiled(module: nn.Module) -> bool:
    """True if calling ``module`` runs compiled code."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def has_compiled(model: nn.Module) -> bool:
    """True if ``model`` or any part of it is compiled."""
    return any(is_compiled(module) for module in model.modules())
