"""Operations of our own in MXNet's engine: what waits for arrays, and makes arrays wait.

MXNet runs every operation when the arrays that it reads and writes are free, in the order in which
they were given to it. An operation that ends when we end it is all that scheduling needs: it
begins when a gradient is computed, and reads of the weight wait until it ends. So nothing has to
be patched, and no reader can be forgotten. (ByteScheduler's dependency proxy, sec. 4, which
needed an extension in C++; ``MXEnginePushAsyncND`` has been in MXNet's C interface since.)
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, check_call

#: FnProperty::kCPUPrioritized in mxnet/engine.h: threads of their own, not those that compute
_PRIORITIZED = ctypes.c_int(3)


class _Context(ctypes.Structure):
    """``mxnet::Context`` in mxnet/base.h."""

    _fields_ = [("device_type", ctypes.c_int), ("device_id", ctypes.c_int32)]


class _OnComplete(ctypes.Structure):
    """``mxnet::engine::CallbackOnComplete`` in mxnet/engine.h."""

    _fields_ = [
        ("callback", ctypes.c_void_p),
        ("engine", ctypes.c_void_p),
        ("param", ctypes.c_void_p),
    ]


_CPU = _Context(1, 0)
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_Began = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_OnComplete), ctypes.c_void_p)

_numbers = itertools.count(1)
#: operations that have not begun, by the number that the engine hands back
_posted: dict[int, Callable[[Held], None]] = {}


class Held:
    """An operation under way, which the engine takes to read and write its arrays."""

    __slots__ = ("_ends",)

    def __init__(self, complete: _OnComplete) -> None:
        # The engine's own object lives only as long as the call that brings it.
        self._ends = [(complete.callback, complete.engine, complete.param)]

    def release(self) -> None:
        """Ends it. From any thread, and idempotent."""
        try:
            callback, engine, param = self._ends.pop()
        except IndexError:
            return
        _Callback(callback)(engine, param, None)


@_Began  # type: ignore[untyped-decorator]
def _began(_context: int, complete: Any, number: int) -> None:
    _posted.pop(number)(Held(complete.contents))


def post(
    began: Callable[[Held], None], *, reads: Sequence[Any] = (), writes: Sequence[Any] = ()
) -> None:
    """Calls ``began``, on a thread of the engine, when the arrays are free for that.

    They stay taken until what it is given is released. It must not raise. No array may be there
    twice, nor two that are views of one another.
    """
    number = next(_numbers)
    _posted[number] = began
    check_call(
        _LIB.MXEnginePushAsyncND(
            _began,
            ctypes.c_void_p(number),
            None,
            ctypes.byref(_CPU),
            _handles(reads),
            len(reads),
            _handles(writes),
            len(writes),
            ctypes.byref(_PRIORITIZED),
            0,
            b"bytesched",
            False,
        )
    )


def _handles(arrays: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(array.handle.value for array in arrays))


def alias(array: Any) -> Any:
    """Another array over the same memory, which the engine takes for one of its own."""
    return mx.nd.from_dlpack(array.to_dlpack_for_write())
