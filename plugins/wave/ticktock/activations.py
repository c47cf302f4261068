"""Activation memory: what autograd keeps from forward for backward, counted on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType

import torch


class ActivationMemory:
    """A context manager that counts the bytes saved for backward in forward passes inside it.

    Storages are counted once, however many tensors share them; those of ``parameters`` are not.
    ``live_bytes`` is what is saved now, ``peak_bytes`` the most that ever was. On a GPU,
    ``torch.cuda.max_memory_allocated`` shows more.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._ignored = {p.untyped_storage().data_ptr() for p in parameters}
        #: how many saved tensors there are of a storage
        self._saved: dict[int, int] = {}
        # Released in the threads of the waves, and by the garbage collector at any moment.
        self._lock = threading.RLock()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor
        )

    def __enter__(self) -> ActivationMemory:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def saved(self, storage: int, nbytes: int) -> bool:
        """One more tensor of ``storage`` is saved; whether that counts."""
        if storage in self._ignored:
            return False
        with self._lock:
            self._saved[storage] = self._saved.get(storage, 0) + 1
            if self._saved[storage] == 1:
                self.live_bytes += nbytes
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return True

    def released(self, storage: int, nbytes: int) -> None:
        """One of them is not needed any more."""
        with self._lock:
            self._saved[storage] -= 1
            if not self._saved[storage]:
                del self._saved[storage]
                self.live_bytes -= nbytes


class _Saved:
    """A saved tensor; lives as long as the graph needs it."""

    def __init__(self, tensor: torch.Tensor, memory: ActivationMemory) -> None:
        self.tensor = tensor
        self._memory = memory
        storage = tensor.untyped_storage()
        self._storage, self._nbytes = storage.data_ptr(), storage.nbytes()
        self._counts = memory.saved(self._storage, self._nbytes)

    def __del__(self) -> None:
        if self._counts:
            self._memory.released(self._storage, self._nbytes)
