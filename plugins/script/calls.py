"""Which calls of a script count: those that train."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Final

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

__all__ = ["is_in_a_mode", "is_inside", "makes_state"]

#: where frameworks call step() by themselves, on the ranks that have no state yet
_MAKE_STATE: Final = frozenset({("torch.distributed.checkpoint.state_dict", "_init_optim_state")})


def makes_state() -> bool:
    """Whether this ``step()`` is a framework's, which makes the state of an optimizer by it."""
    return any(
        (frame.f_globals.get("__name__"), frame.f_code.co_name) in _MAKE_STATE
        for frame in _frames()
    )


def is_inside(code: CodeType) -> bool:
    """Whether this call is made by ``code``."""
    return any(frame.f_code is code for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_in_a_mode() -> bool:
    """Whether this forward pass is traced or counted, and so none to begin with."""
    modes = _get_current_function_mode_stack()
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or any(not isinstance(mode, DeviceContext) for mode in modes)
    )
