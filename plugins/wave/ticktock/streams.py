"""Where the waves run: on the CPU in threads alone, on a GPU on a stream each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


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
