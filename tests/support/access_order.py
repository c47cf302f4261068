"""A watch over what comes after what: which memory every operation reads and writes, and where.

`Order` knows the streams of `fake_cuda`, and names what no wait orders after the last write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple
from unittest import mock

import torch
from fake_cuda import CUDA, Clock
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from bytesched.plugins.planned import stepping
from bytesched.plugins.planned.bundles import BundleState, Slot
from bytesched.plugins.proxies.pending import tensors_in
from bytesched.plugins.update import surroundings

__all__ = ["Order"]


class Access(NamedTuple):
    """A read or a write of some bytes, and its place."""

    begin: int
    end: int
    #: the stream, and what was queued there by then
    stream: str
    queued: int
    by: str
    is_write: bool
    #: it is to be summed before anybody reads it
    is_unsummed: bool = False

    def is_before(self, place: Clock) -> bool:
        """Whether something orders what has this place after it."""
        return place[self.stream] >= self.queued


#: a stream for each sum
_sums = count(1)
#: they read shapes alone
_SHAPES = ("_like", "new_empty", "new_full", "new_ones", "new_zeros", "new_empty_strided")
#: nothing of what they write into is read
_OVERWRITING = {
    *("copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_")
}


@lru_cache
def _arguments(func: Any) -> tuple[str, list[tuple[str, bool]]] | None:
    """The name of an operation, its arguments, and which are written; None if it has no kernel."""
    schema = func._schema
    name = schema.name.rpartition("::")[2]
    returned = [one.alias_info for one in schema.returns]
    is_view = any(info is not None and not info.is_write for info in returned)
    if is_view or schema.name.startswith("profiler"):
        return None
    infos = () if name.endswith(_SHAPES) else ((a.name, a.alias_info) for a in schema.arguments)
    return name, [(one, info is not None and info.is_write) for one, info in infos]


class Order(TorchDispatchMode):
    """Notes what operations read and write, and finds those that nothing orders.

    It is part of the device: product code does not see that there is a mode.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: what was found, in words
        self.found: list[str] = []
        #: by storage; whoever refers to it, however weakly, keeps its number from others
        self._accesses: dict[int, list[Access]] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        #: what gives a name to memory
        self.names: list[Callable[[], Iterable[tuple[str, Tensor]]]] = []
        #: parameters that may be owed an update
        self.slots: list[Slot] = []
        #: whether DDP is copying what nobody reads before it is summed
        self.may_copy: list[Callable[[], bool]] = []
        self._is_off = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, everything of this thread is noted, what sessions do out of sight, too."""
        with (
            mock.patch.object(stepping, "has_modes", return_value=False),
            mock.patch.object(surroundings, "_disable_current_modes", self._only),
            self,
        ):
            yield

    @contextmanager
    def _only(self) -> Iterator[None]:
        with _disable_current_modes(), self:
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, nothing is noted."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            arguments = None if self._is_off else _arguments(func)
            if arguments is not None:
                known = self._note(*arguments, args, kwargs)
            made = func(*args, **kwargs)
            if arguments is not None:
                self._made(arguments[0], made, known)
            return made

    def _note(
        self, name: str, parameters: Sequence[tuple[str, bool]], args: Any, kwargs: Any
    ) -> set[int]:
        """One operation; returns the storages of all that it is given."""
        known: set[int] = set()
        place, stream = CUDA.current().queue(), CUDA.current().name
        written: list[Tensor] = []
        for number, (parameter, is_written) in enumerate(parameters):
            value = args[number] if number < len(args) else kwargs.get(parameter)
            tensors = tensors_in(value)
            known.update(_memory(tensor)[0] for tensor in tensors)
            written += tensors if is_written else []
            if is_written and (name in _OVERWRITING or parameter == "out"):
                continue
            for tensor in tensors:
                self._access(tensor, place, stream, name, is_write=False)
        for tensor in written:
            self._access(tensor, place, stream, name, is_write=True)
        return known

    def _made(self, name: str, made: Any, known: set[int]) -> None:
        stream = CUDA.current()
        for tensor in tensors_in(made):
            if _memory(tensor)[0] not in known:
                self._access(tensor, stream.clock, stream.name, name, is_write=True)

    @contextmanager
    def bringing(self) -> Iterator[None]:
        """Inside, sums are written to where updates that are owed read them."""
        slots, self.slots = self.slots, []
        try:
            yield
        finally:
            self.slots = slots

    def starts(self, tensor: Tensor, after: Clock) -> Clock:
        """A sum begins where nothing else runs, after what is queued here; returns its place.

        Args:
            after: of other sums that have to end before.
        """
        place, name = CUDA.current().queue() | after, f"sum {next(_sums)}"
        place[name] = 1
        self._access(tensor, place, name, name, is_write=True, reads=True)
        return place

    def leaves_unsummed(self, tensor: Tensor) -> None:
        """What was written into ``tensor`` until now is to be summed before anybody reads it."""
        self._access(tensor, CUDA.current().queue(), CUDA.current().name, "backward", is_write=True)
        memory, begin, _ = _memory(tensor)
        if begin:
            self._accesses[memory][-1] = self._accesses[memory][-1]._replace(is_unsummed=True)

    def _access(
        self,
        tensor: Tensor,
        place: Clock,
        stream: str,
        by: str,
        *,
        is_write: bool,
        reads: bool = False,
    ) -> None:
        memory, begin, end = _memory(tensor)
        if begin == end:
            return
        for slot in () if reads else self.slots:
            self._is_owed(slot, by, (memory, begin, end), is_write=is_write)
        if memory not in self._storages:
            self._storages[memory] = StorageWeakRef(tensor.untyped_storage())
        before = self._accesses.setdefault(memory, [])
        for other in before:
            if other.begin >= end or begin >= other.end:
                continue
            is_after = other.is_before(place)
            reads_unsummed = other.is_unsummed and (reads or not is_write)
            if (is_after and not reads_unsummed) or not (is_write or other.is_write):
                continue
            if by == "copy_" and not is_write and any(may() for may in self.may_copy):
                continue
            how = "which is not summed, by" if is_after else "and waits for no end of"
            where = "" if other.by.startswith("sum ") else f" on {other.stream}"
            self._find(by, begin, end, f"{how} {other.by}{where}", is_write=is_write)
        # What is overwritten, or read again on the same stream, decides no more.
        before[:] = [
            other
            for other in before
            if not (begin <= other.begin and other.end <= end)
            or (other.is_write and not is_write)
            or not other.is_before(place)
        ]
        before.append(Access(begin, end, stream, place[stream], by, is_write))

    def _is_owed(self, slot: Slot, by: str, where: tuple[int, int, int], *, is_write: bool) -> None:
        """An update is to be made, of a parameter and from a gradient that stay as they are."""
        bundle = slot.bundle
        if bundle.state is not BundleState.OWED:
            return
        if not any(slot in debt.slots for debt in bundle.debts):
            return
        if _overlap(where, _memory(slot.parameter)):
            self._find(by, *where[1:], "which waits for its update", is_write=is_write)
        elif is_write and slot.member and _overlap(where, _memory(slot.member.view)):
            self._find(by, *where[1:], "which an update is to read", is_write=True)

    def _find(self, by: str, begin: int, end: int, why: str, *, is_write: bool = False) -> None:
        names = [
            name
            for known in self.names
            for name, tensor in known()
            if _overlap((0, begin, end), _memory(tensor))
        ]
        what = ", ".join(dict.fromkeys(names)) or "something"
        stream = CUDA.current().name
        self.found.append(f"{by} on {stream} {'writes' if is_write else 'reads'} {what}, {why}")


def _memory(tensor: Tensor) -> tuple[int, int, int]:
    """Its storage, and from which address to which it lies there."""
    with torch._C.DisableTorchFunctionSubclass():
        if not tensor.numel():
            return 0, 0, 0
        begin = tensor.data_ptr()
        last = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        storage: Any = tensor.untyped_storage()
        return storage._cdata, begin, begin + (last + 1) * tensor.element_size()


def _overlap(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return max(one[1], other[1]) < min(one[2], other[2])
