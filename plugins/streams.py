"""CUDA streams and events behind one seam; on the CPU there is nothing to order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from bytesched.task import CommTask

__all__ = ["CudaStreams", "Streams", "streams_for"]


class Streams:
    """Orders backward, communication, update and forward. Does nothing, for the CPU."""

    def backward_done(self, task: CommTask) -> None:
        """The last gradient of ``task`` has been queued on the current stream."""

    def communication(self, task: CommTask) -> AbstractContextManager[None]:
        """Where ``task`` is packed and sent: after its gradients."""
        return nullcontext()

    def completion(self, task: CommTask) -> AbstractContextManager[None]:
        """Where the end of ``task`` is awaited; on exit it is complete, not only enqueued."""
        return nullcontext()

    def update(self) -> AbstractContextManager[None]:
        """Where a bundle is updated: after everything that was completed before."""
        return nullcontext()

    def read(self) -> None:
        """Makes the current stream wait for all gradients and updates finished so far."""

    def stepped(self) -> None:
        """``step()`` was called: updates come after what the current stream has queued."""


class CudaStreams(Streams):
    """One stream for communication, one for updates; the host waits for neither's kernels.

    Credit returns from a completion event, awaited by the waiter's thread without polling.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._communication = torch.cuda.Stream(device, priority=-1)
        self._update = torch.cuda.Stream(device)
        self._ready: dict[int, torch.cuda.Event] = {}

    def backward_done(self, task: CommTask) -> None:
        event = self._ready.setdefault(task.index, torch.cuda.Event())
        event.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def communication(self, task: CommTask) -> Iterator[None]:
        with torch.cuda.stream(self._communication):
            if (ready := self._ready.get(task.index)) is not None:
                self._communication.wait_event(ready)
            yield

    @contextmanager
    def completion(self, task: CommTask) -> Iterator[None]:
        with torch.cuda.stream(self._communication):
            yield
            complete = torch.cuda.Event(blocking=True)
            complete.record(self._communication)
        complete.synchronize()

    @contextmanager
    def update(self) -> Iterator[None]:
        with torch.cuda.stream(self._update):
            yield

    def read(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._update)

    def stepped(self) -> None:
        self._update.wait_stream(torch.cuda.current_stream(self._device))


def streams_for(device: torch.device) -> Streams:
    """The streams for gradients on ``device``."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
