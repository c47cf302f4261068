"""torch.compile beside a thread that updates: the two exclude each other.

While torch compiles or exports, ``torch.compiler.is_compiling()`` is true for every thread, and
optimizers then take other code paths, which round differently. And the compiler reads parameters:
a pending one would wait for an update that waits for the compiler.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

_POLL_S = 0.001

#: from torch 2.7 on; true for all threads while one exports
_are_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)

#: torch's own lock, held from before a compilation raises its flag until after it is down
_compile_lock: Any = None
#: true while a thread that compiles waits for an update
_compiler_waits = False
#: held by an update that goes on because the compiler waits
_unlocked = threading.Lock()


def is_exporting() -> bool:
    """Whether ``torch.export`` has called this, not only in another thread."""
    return _are_exporting() and (torch.compiler.is_dynamo_compiling() or _is_below_export())


def _is_below_export() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.export._trace":
        frame = frame.f_back
    return frame is not None


def exclude_compiler() -> bool:
    """From now on updates and compilations exclude each other; False if this torch cannot."""
    global _compile_lock
    if _compile_lock is None:
        try:
            from torch._dynamo import convert_frame

            lock: Any = convert_frame.compile_lock
            lock._is_owned()
        except (ImportError, AttributeError):
            return False
        _compile_lock = lock
    return True


@contextmanager
def updating() -> Iterator[None]:
    """Inside, no compilation goes on."""
    lock = _acquired()
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _acquired() -> Any:
    """The lock that keeps the compiler out: its own, or another while it waits for us."""
    while _compile_lock is not None:
        if _compile_lock.acquire(timeout=_POLL_S):
            return _compile_lock
        if _compiler_waits:
            _unlocked.acquire()
            if _compiler_waits:
                return _unlocked
            _unlocked.release()
    return None


@contextmanager
def waiting() -> Iterator[None]:
    """Inside, this thread waits for updates, which may go on even if it is compiling."""
    global _compiler_waits
    flag = getattr(torch.compiler, "_is_compiling_flag", False)
    if _compile_lock is None or not _compile_lock._is_owned():
        # torch.export holds no lock.
        if flag and is_exporting():
            torch.compiler._is_compiling_flag = False
            try:
                yield
            finally:
                torch.compiler._is_compiling_flag = flag
        else:
            yield
        return
    torch.compiler._is_compiling_flag = False
    _compiler_waits = True
    try:
        yield
    finally:
        _compiler_waits = False
        with _unlocked:
            # No update is under way any more, and none begins.
            torch.compiler._is_compiling_flag = flag


def is_compiled(module: nn.Module) -> bool:
    """True if calling ``module`` runs compiled code."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def has_compiled(model: nn.Module) -> bool:
    """True if ``model`` or any part of it is compiled."""
    return any(is_compiled(module) for module in model.modules())
