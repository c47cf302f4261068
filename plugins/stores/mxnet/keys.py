"""Keys of an MXNet store, cut into chunks that are keys of their own on its servers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd

from bytesched.errors import MismatchError, PluginError
from bytesched.kvstore import pipes
from bytesched.kvstore.protocol import Key
from bytesched.task import CommTask

from .engine import Held, alias

#: Keys of ours begin here. MXNet chooses a key's server by the remainder of ``key * 9973``, in 32
#: bits, so there is an end as well.
_FIRST = 100_000
_LAST = (2**31 - 1) // 9973
#: of a text under a key, an element for each byte
_TEXT_BYTES = 512
#: Optimizers that treat every element on its own, and whose state is per key or per element.
_ELEMENTWISE = frozenset(
    {"SGD", "NAG", "Adam", "AdaGrad", "RMSProp", "AdaDelta", "Ftrl", "FTML", "Adamax", "Signum"}
)
#: Through the whole process: the servers keep what a closed store has made there.
_numbers = itertools.count(_FIRST)


def new_number() -> int:
    """By which a key is on the servers, not used before; neighbours are on neighbouring servers."""
    number = next(_numbers)
    if number > _LAST:
        raise PluginError(
            f"more than {_LAST - _FIRST} chunks, which MXNet cannot number: raise partition_bytes"
        )
    return number


class Chunk(pipes.Chunk):
    """A range of a key: a key on the servers, and a task for its push and one for its pull."""

    __slots__ = ("buffers",)

    def __init__(self, number: Key, push_task: CommTask) -> None:
        super().__init__(number, push_task, follows=False)
        #: this range of the slot's buffers, as arrays that are different ones to the engine
        self.buffers: list[Any] = []


class KeySlot:
    """A key of the user: its chunks, and buffers between them and the user's arrays.

    There is a buffer for each device that the key's values are on; a store sums over devices.

    Args:
        value: what the key is made with; the engine will copy it.
    """

    def __init__(self, key: Key, value: Any) -> None:
        self.key = key
        self.shape = tuple(value.shape)
        self.dtype = value.dtype
        #: none before `cut`
        self.chunks: list[Chunk] = []
        self.buffers: list[Any] = []
        #: where they are
        self.contexts: list[Any] = []
        #: what goes on with it now, if anything does
        self.call = ""
        self.held: Held | None = None
        #: ends of its tasks that this waits for
        self.missing = 0
        self.place([value])
        self.take([value])

    @property
    def nbytes(self) -> int:
        """Size of a value, in bytes."""
        return self._size * self._itemsize

    def cut(self, partition_bytes: int) -> list[Chunk]:
        """Makes its chunks, of about ``partition_bytes``, or one if that is 0.

        A key that stays whole keeps the number that it would have without us.
        """
        whole = CommTask(str(self.key), start_at=0, stop_at=self._size, itemsize=self._itemsize)
        tasks = whole.partition(partition_bytes) if partition_bytes else (whole,)
        is_own = len(tasks) == 1 and isinstance(self.key, int) and 0 <= self.key < _FIRST
        for task in tasks:
            self.chunks.append(Chunk(self.key if is_own else new_number(), task))
        self._point_chunks()
        return self.chunks

    def place(self, values: Sequence[Any]) -> None:
        """New buffers where ``values`` are; nothing of the key may be under way."""
        self.contexts = [value.context for value in values]
        self.buffers = [mx.nd.zeros(self._size, ctx, dtype=self.dtype) for ctx in self.contexts]
        self._point_chunks()

    def _point_chunks(self) -> None:
        for chunk in self.chunks:
            task = chunk.push_task
            chunk.buffers = [alias(buffer[task.start_at : task.stop_at]) for buffer in self.buffers]

    @property
    def _size(self) -> int:
        return math.prod(self.shape)

    @property
    def _itemsize(self) -> int:
        return int(np.dtype(self.dtype).itemsize)

    def check(self, call: str, arrays: Sequence[Any]) -> None:
        """MismatchError unless the arrays are what the key was initialised as."""
        for array in arrays:
            if tuple(array.shape) != self.shape or array.dtype != self.dtype:
                raise MismatchError(
                    f"{call} of key {self.key!r} with {_kind(array)}; it was initialised as "
                    f"{np.dtype(self.dtype).name} {self.shape}"
                )

    def take(self, values: Sequence[Any]) -> None:
        """The engine will copy ``values`` into the buffers."""
        with autograd.pause():
            for value, buffer in zip(values, self.buffers, strict=True):
                value.reshape((-1,)).copyto(buffer)

    def give(self, outs: Sequence[Any]) -> None:
        """The engine will copy the buffers into ``outs``, each from its own device if possible."""
        with autograd.pause():
            for out in outs:
                here = [buffer for buffer in self.buffers if buffer.context == out.context]
                (here or self.buffers)[0].reshape(self.shape).copyto(out)

    def __repr__(self) -> str:
        return f"<KeySlot {self.key!r} in {len(self.chunks)} chunks, {self.call or 'idle'}>"


def _kind(array: Any) -> str:
    return f"{np.dtype(array.dtype).name} {tuple(array.shape)}"


def pairs(keys: Any, values: Any) -> list[tuple[Key, list[Any]]]:
    """Each key with its arrays, one for each device."""
    if not isinstance(keys, list | tuple):
        keys, values = [keys], [values]
    return [
        (key, list(value) if isinstance(value, list | tuple) else [value])
        for key, value in zip(keys, values, strict=True)
    ]


def published(store: Any, number: int, text: str) -> str:
    """What worker 0 gives as ``text``, on every worker; ``number`` is a new key of ``store``."""
    given = text.encode()
    value = mx.nd.array([*given, *bytes(_TEXT_BYTES - len(given))])
    store.init(number, value)
    store.pull(number, out=value)
    return bytes(value.asnumpy().astype("uint8")).rstrip(b"\0").decode()


def why_whole(optimizer: Any) -> str:
    """Why an optimizer on the servers needs every key as a whole, or nothing."""
    name = type(optimizer).__name__
    if type(optimizer).__module__ != "mxnet.optimizer.optimizer" or name not in _ELEMENTWISE:
        return f"{name} is not known to treat every element on its own"
    if optimizer.idx2name or optimizer.lr_mult or optimizer.wd_mult:
        return f"{name} has settings for single keys"
    if optimizer.multi_precision:
        return f"{name} keeps a copy of each key in float32"
    return ""
