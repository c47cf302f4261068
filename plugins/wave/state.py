"""What each wave has of its own: its batch, its stream, and what a forward pass leaves behind.

And a count of what autograd keeps of forward passes for backward, on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from bytesched.errors import PluginError

_DRAWING = (nn.modules.dropout._DropoutNd, nn.RReLU)


def interfering(model: nn.Module) -> list[str]:
    """Names of the modules by which one wave changes what the next one computes.

    Forward passes never overlap, so the effect is that of gradient accumulation: statistics are
    updated once per wave, random numbers are drawn in the order of the waves.
    """
    return [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if module.training and (_keeps_statistics(module) or _draws(module))
    ]


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and bool(module.track_running_stats)


def _draws(module: nn.Module) -> bool:
    if isinstance(module, _DRAWING):
        return getattr(module, "p", 1.0) > 0
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0


class WaveStates:
    """Statistics and random numbers for each wave, as if it were a rank of its own.

    Wave 0 has those of the model and of torch. The others begin with a copy of the statistics,
    and with seeds of their own. They are put in place for a wave's forward pass.

    Args:
        ranks: how many there are. Scripts add the rank to the seed: a wave adds more than that.
    """

    def __init__(self, model: nn.Module, waves: int, ranks: int) -> None:
        holders = [module for module in model.modules() if _keeps_statistics(module)]
        self._buffers = [
            (module, name, [buffer, *(buffer.clone() for _ in range(waves - 1))])
            for module in holders
            for name, buffer in module.named_buffers(recurse=False)
        ]
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        self._generators = [torch.default_generator] + [
            torch.cuda.default_generators[device.index] for device in devices
        ]
        self._random = [self._seeded(wave * ranks) for wave in range(waves)]

    def _seeded(self, more: int) -> list[torch.Tensor]:
        return [
            torch.Generator(generator.device)
            .manual_seed(generator.initial_seed() + more)
            .get_state()
            for generator in self._generators
        ]

    @contextmanager
    def of(self, wave: int) -> Iterator[None]:
        """Inside, the model has the statistics of ``wave``, and torch its random numbers."""
        if wave == 0:
            yield
            return
        mine = [generator.get_state() for generator in self._generators]
        for module, name, copies in self._buffers:
            module._buffers[name] = copies[wave]
        self._set(self._random[wave])
        try:
            yield
        finally:
            self._random[wave] = [generator.get_state() for generator in self._generators]
            self._set(mine)
            for module, name, copies in self._buffers:
                module._buffers[name] = copies[0]

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def of_waves(batches: Sequence[Any], waves: int) -> tuple[list[Any], list[float]]:
    """The batch of every wave, and the share of its loss in that of the step.

    One batch is split along the first dimension of all tensors in it; the share of a part is
    its share of the samples. As many batches as waves are taken as they are, with equal shares.
    """
    if len(batches) == waves:
        return list(batches), [1 / waves] * waves
    if len(batches) != 1:
        raise PluginError(f"got {len(batches)} batches for {waves} waves: pass one, or {waves}")
    (batch,) = batches
    samples: set[int] = set()
    _mapped(batch, lambda tensor: samples.add(len(tensor)))
    if len(samples) != 1:
        raise PluginError(
            f"the first dimensions of the batch are {sorted(samples) or 'missing'}: one that is to "
            f"be split has the same in all its tensors; or pass {waves} batches, one for each wave"
        )
    (size,) = samples
    if size < waves:
        raise PluginError(f"a batch of {size} has nothing for {waves} waves")
    parts = [slice(*cut) for cut in pairwise(size * wave // waves for wave in range(waves + 1))]
    return (
        [_mapped(batch, itemgetter(part)) for part in parts],
        [(part.stop - part.start) / size for part in parts],
    )


def _mapped(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``batch`` with each tensor in it changed, but for those without a dimension."""
    if isinstance(batch, torch.Tensor):
        return change(batch) if batch.dim() else batch
    if isinstance(batch, dict):
        return type(batch)((key, _mapped(item, change)) for key, item in batch.items())
    if isinstance(batch, (list, tuple)):
        items = [_mapped(item, change) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


class Lanes:
    """Orders the work of the waves on a device. Does nothing, for the CPU."""

    def begin(self) -> None:
        """A step begins: what the current stream has queued comes before all waves."""

    def forward(self, wave: int) -> AbstractContextManager[None]:
        """Where the forward pass of ``wave`` runs: after that of the wave before."""
        return nullcontext()

    def backward(self, wave: int) -> AbstractContextManager[None]:
        """Where its backward pass runs, in a thread of its own."""
        return nullcontext()

    def give(self) -> torch.cuda.Event | None:
        """What has to be waited for before reading a gradient queued on the current stream."""
        return None

    def take(self, gradient: torch.Tensor, given: torch.cuda.Event | None) -> None:
        """Lets the current stream read a gradient that another wave gave."""

    def end(self) -> None:
        """All waves are queued: the current stream goes on after them."""

    def synchronize(self) -> None:
        """Waits for all that is queued, so that a step can be timed."""


class CudaLanes(Lanes):
    """A stream for every wave."""

    def __init__(self, device: torch.device, waves: int) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(waves)]
        self._turn: torch.cuda.Event

    def begin(self) -> None:
        self._turn = torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def forward(self, wave: int) -> Iterator[None]:
        stream = self._streams[wave]
        stream.wait_event(self._turn)
        with torch.cuda.stream(stream):
            yield
        self._turn = stream.record_event()

    @contextmanager
    def backward(self, wave: int) -> Iterator[None]:
        # The device as well: a new thread begins on device 0.
        with torch.cuda.device(self._device), torch.cuda.stream(self._streams[wave]):
            yield

    def give(self) -> torch.cuda.Event:
        given = torch.cuda.Event()
        given.record(torch.cuda.current_stream(self._device))
        return given

    def take(self, gradient: torch.Tensor, given: torch.cuda.Event | None) -> None:
        current = torch.cuda.current_stream(self._device)
        if given is not None:
            current.wait_event(given)
        # It is let go of before this stream has read it.
        gradient.record_stream(current)

    def end(self) -> None:
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            current.wait_stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


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

    def __exit__(self, *ended: Any) -> None:
        self._hooks.__exit__(*ended)

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
