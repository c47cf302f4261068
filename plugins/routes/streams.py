"""CUDA streams and events behind one seam; on the CPU there is nothing to order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Final

import torch

from bytesched.errors import PluginError
from bytesched.task import CommTask

__all__ = ["CudaStreams", "Streams", "streams_for"]

_NOTHING: Final = nullcontext()

#: Called with a task whose gradients have been computed.
_Then = Callable[[CommTask], None]


class Streams:
    """Orders backward, communication, update and forward. Does nothing, for the CPU."""

    #: whether gradients may come on several streams: else `gradient` need not be called
    are_several = False

    def begin(self) -> None:
        """A forward pass begins; raises PluginError if its kernels are only recorded."""

    def gradient(self) -> None:
        """A gradient has been queued on the current stream."""

    def backward_done(self, task: CommTask, then: _Then) -> None:
        """The last gradient of ``task`` has been queued: ``then(task)`` when all are computed.

        ``then`` is called once, in the order of these calls, on one thread.
        """
        then(task)

    def communication(self, task: CommTask) -> AbstractContextManager[None]:
        """Where ``task`` is packed and sent."""
        return _NOTHING

    def completion(self, task: CommTask) -> AbstractContextManager[None]:
        """Where the end of ``task`` is awaited; on exit it is complete, not only enqueued."""
        return _NOTHING

    def update(self) -> AbstractContextManager[None]:
        """Where a bundle is updated."""
        return _NOTHING

    def read(self) -> None:
        """Makes the user's streams wait for all updates queued so far."""

    def stepped(self) -> None:
        """``step()`` was called: updates come after what the current stream has queued."""

    def lend(self, values: Iterable[object]) -> None:
        """Updates will read the tensors among ``values``, which may be let go of meanwhile."""

    def moment(self) -> Any:
        """Now, as ``seconds`` takes it: when all that is queued by now has been computed."""
        return perf_counter()

    def seconds(self, began: Any, ended: Any) -> float:
        """From one moment to a later one; returns when that has come."""
        elapsed_s: float = ended - began
        return elapsed_s

    def close(self) -> None:
        """Stops what runs beside the user's thread; nothing more becomes computed. Idempotent."""


class CudaStreams(Streams):
    """Streams to send, to receive and to update on; the user's thread waits for none of them.

    What is complete (a gradient that may be sent, a chunk whose credit returns) is known from
    events, each awaited without polling, and never by the user's thread.

    Args:
        device: where parameters and gradients are.
        fail: called with an error of the device.
    """

    are_several = True

    def __init__(self, device: torch.device, fail: Callable[[BaseException], None]) -> None:
        self._device = device
        self._fail = fail
        self._sending = torch.cuda.Stream(device, priority=-1)
        # A stream of its own: what was received must not queue behind what is packed next.
        self._receiving = torch.cuda.Stream(device, priority=-1)
        self._updating = torch.cuda.Stream(device)
        #: streams that the model or the optimizer was seen on, by handle
        self._users: dict[int, torch.cuda.Stream] = {}
        self._queued: SimpleQueue[tuple[CommTask, list[torch.cuda.Event], _Then] | None] = (
            SimpleQueue()
        )
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="bytesched-gradients", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise PluginError(
                "a CUDA graph is being captured over a wrapped model: its replays would bypass "
                "everything that waits for an update. Make graphed callables before wrap, or "
                "capture after unwrap"
            )

    def gradient(self) -> None:
        if torch._C._cuda_getCurrentRawStream(self._device.index) not in self._users:
            self._see(torch.cuda.current_stream(self._device))

    def backward_done(self, task: CommTask, then: _Then) -> None:
        # Not handed over before it is computed: backward is queued long before it has run, so
        # the most urgent chunk of all, which is computed last, would be chosen first and keep
        # the wire idle until then.
        self._see(torch.cuda.current_stream(self._device))
        events = []
        for stream in tuple(self._users.values()):
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
            events.append(event)
        self._queued.put((task, events, then))

    def communication(self, task: CommTask) -> AbstractContextManager[None]:
        return self._on(self._sending)

    @contextmanager
    def completion(self, task: CommTask) -> Iterator[None]:
        complete = torch.cuda.Event(blocking=True)
        with self._on(self._receiving):
            yield
            complete.record(self._receiving)
        complete.synchronize()

    def update(self) -> AbstractContextManager[None]:
        return self._on(self._updating)

    def read(self) -> None:
        # All of them: the next reader, on another stream, finds the parameter free.
        self._see(torch.cuda.current_stream(self._device))
        updated = self._updating.record_event()
        for stream in tuple(self._users.values()):
            stream.wait_event(updated)

    def stepped(self) -> None:
        current = torch.cuda.current_stream(self._device)
        self._see(current)
        self._updating.wait_stream(current)

    def lend(self, values: Iterable[object]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(self._updating)

    def moment(self) -> Any:
        # The host queues plain steps long before they run: its clock would show how fast it is.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        ended.synchronize()
        elapsed_ms: float = began.elapsed_time(ended)
        return elapsed_ms / 1e3

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queued.put(None)
            self._thread.join(5.0)

    def _see(self, stream: torch.cuda.Stream) -> None:
        self._users.setdefault(stream.cuda_stream, stream)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        # The device as well: a thread of ours begins on device 0, where it must not leave a
        # context behind.
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    def _run(self) -> None:
        """The thread that learns when gradients have been computed."""
        with torch.cuda.device(self._device):
            while (queued := self._queued.get()) is not None:
                task, events, then = queued
                try:
                    for event in events:
                        event.synchronize()
                    if not self._closed:
                        then(task)
                except Exception as error:  # noqa: BLE001 - it must reach the user's thread
                    self._fail(error)
                    return


def streams_for(device: torch.device, fail: Callable[[BaseException], None]) -> Streams:
    """The streams for gradients on ``device``; ``fail`` is called with an error of it."""
    return CudaStreams(device, fail) if device.type == "cuda" else Streams()
