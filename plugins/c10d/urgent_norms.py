"""SyncBatchNorm, whose forward and backward pass wait for other ranks: urgent while it is used."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

from torch import nn
from torch.nn.modules import _functions

from bytesched.urgency import urgent

__all__ = ["make_norms_urgent"]

_PASSES: Final = ("forward", "backward")
_lock = threading.Lock()
#: wrapped models that have one, and the passes as torch has them
_models = 0
_plain: dict[str, Callable[..., Any]] = {}


def make_norms_urgent(model: nn.Module) -> Callable[[], None]:
    """Makes the passes of SyncBatchNorm urgent, if ``model`` has any; returns what undoes it."""
    global _models
    if not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return _nothing
    with _lock:
        _models += 1
        if _models == 1:
            for name in _PASSES:
                _plain[name] = plain = getattr(_functions.SyncBatchNorm, name)
                setattr(_functions.SyncBatchNorm, name, staticmethod(_urgent(plain)))
    return _give_back


def _give_back() -> None:
    global _models
    with _lock:
        _models -= 1
        if not _models:
            for name in _PASSES:
                setattr(_functions.SyncBatchNorm, name, staticmethod(_plain[name]))


def _urgent(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def run(*args: Any) -> Any:
        with urgent("SyncBatchNorm"):
            return plain(*args)

    return run


def _nothing() -> None:
    pass
