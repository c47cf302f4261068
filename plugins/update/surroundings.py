"""What decides numbers, as it is in ``step()``: it goes with an update to another thread.

Of the thread, and the hyper-parameters, which nobody changes afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from numbers import Number
from sys import float_info
from typing import Any, Final

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

#: the kinds of devices that parameters are on
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Surroundings:
    """Of one thread at one moment."""

    #: kind of device, whether autocast is on for it, and its dtype
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    is_autocast_cached: bool
    is_grad_enabled: bool
    is_inference: bool
    flushes_denormals: bool
    #: that compute one operation, for the order in which sums are added up
    threads: int
    #: default devices, the innermost last
    modes: tuple[TorchFunctionMode, ...]

    @classmethod
    def here(cls) -> Surroundings:
        """Those of the calling thread, whose modes are default devices alone."""
        return cls(
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in _DEVICES
            ),
            is_autocast_cached=torch.is_autocast_cache_enabled(),
            is_grad_enabled=torch.is_grad_enabled(),
            is_inference=torch.is_inference_mode_enabled(),
            # torch has no way to ask. Of the thread, and so of Python's own numbers.
            flushes_denormals=float_info.min / 2 == 0.0,
            threads=torch.get_num_threads(),
            modes=tuple(_function_modes()),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the calling thread has them, and no mode, transform or trace of its own."""
        before = Surroundings.here()
        is_alike = before == self and not torch._C._len_torch_dispatch_stack()
        is_alike = is_alike and torch._C._get_tracing_state() is None
        if is_alike and torch._C._functorch.peek_interpreter_stack() is None:
            yield
            return
        tracing: Any = torch._C
        trace = tracing._get_tracing_state()
        tracing._set_tracing_state(None)
        try:
            with (
                _disable_current_modes(),
                temporarily_clear_interpreter_stack(),
                torch.inference_mode(self.is_inference),
                torch.set_grad_enabled(self.is_grad_enabled),
            ):
                self._take_over(before)
                try:
                    yield
                finally:
                    before._take_over(self)
        finally:
            tracing._set_tracing_state(trace)

    def _take_over(self, before: Surroundings) -> None:
        """The calling thread, which has those of ``before``, gets these."""
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.is_autocast_cached)
        if before.flushes_denormals != self.flushes_denormals:
            torch.set_flush_denormal(self.flushes_denormals)
        if before.threads != self.threads:
            torch.set_num_threads(self.threads)
        for _ in before.modes:
            torch._C._pop_torch_function_stack()
        for mode in self.modes:
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, no mode or trace of this thread sees what is done, and gradients are not recorded."""
    are_seen = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    if not are_seen and torch._C._get_tracing_state() is None:
        with torch.no_grad():
            yield
        return
    with replace(Surroundings.here(), modes=(), is_grad_enabled=False).entered():
        yield


def has_modes() -> bool:
    """True if this thread has modes that see every operation, and so must see those of a step."""
    return bool(torch._C._len_torch_dispatch_stack()) or not all(
        isinstance(mode, DeviceContext) for mode in _function_modes()
    )


def _function_modes() -> Iterator[TorchFunctionMode]:
    for index in range(torch._C._len_torch_function_stack()):
        yield torch._C._get_function_stack_at(index)


#: of values that nothing can change
_PLAIN: Final = frozenset(
    {bool, bytes, complex, float, int, str, type(None)}
    | {torch.device, torch.dtype, torch.layout, torch.memory_format}
)
_COLLECTIONS: Final = (list, tuple, set, frozenset)

#: of a group, what is no hyper-parameter: which names go with a part of ``params`` is not known
_NAMING: Final = ("params", "param_names")


def snapshot(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of ``group`` as they are now; tensors are cloned, lists copied."""
    return {key: _frozen(value) for key, value in group.items() if key not in _NAMING}


def why_not_frozen(groups: Sequence[dict[str, Any]]) -> str:
    """Why a snapshot of ``groups`` may change later; empty if it cannot."""
    for group in groups:
        for key, value in group.items():
            if key not in _NAMING and type(value) not in _PLAIN and not _can_freeze(value):
                return (
                    f"a parameter group holds {key!r}, a {type(value).__name__}, which may be "
                    "something else when the update is made"
                )
    return ""


def _can_freeze(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, (torch.Tensor, Number, Enum)):
        return True
    if kind in _COLLECTIONS:
        return all(map(_can_freeze, value))
    return kind is dict and all(map(_can_freeze, (*value, *value.values())))


def _frozen(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.clone()
    if kind in _COLLECTIONS:
        return kind(map(_frozen, value))
    if kind is dict:
        return {key: _frozen(item) for key, item in value.items()}
    return value
