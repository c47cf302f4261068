"""torch.compile beside a thread that updates: the two exclude each other.

While torch compiles, ``torch.compiler.is_compiling()`` is true for every thread, and optimizers
then take other code paths, which round differently.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

__all__ = ["exclude_compiler", "has_compiled", "is_compiled", "not_compiling"]

#: Held by the compiler from start to end (re-entrant: compilations nest), and by each update.
not_compiling = threading.RLock()

_excluded = False


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


def _on_start(*args: Any) -> None:
    not_compiling.acquire()


def _on_end(*args: Any) -> None:
    not_compiling.release()


def is_compiled(module: nn.Module) -> bool:
    """True if calling ``module`` runs compiled code."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def has_compiled(model: nn.Module) -> bool:
    """True if ``model`` or any part of it is compiled."""
    return any(is_compiled(module) for module in model.modules())
