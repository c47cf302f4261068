"""Virtual time: a clock that moves when told, a modelled link, and an iteration over it."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bytesched.admission import Foreseen
from bytesched.core import SchedulerCore
from bytesched.errors import SchedulerClosed
from bytesched.order import Leading
from bytesched.policy import Policy, Prophet
from bytesched.task import CommTask
from bytesched.transport import Done

__all__ = ["LinkTransport", "ManualClock", "SimulatedIteration", "simulate"]


class ManualClock:
    """Time that moves only when told, and calls what falls due on the way."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._sequence = 0
        self._lock = threading.Lock()

    def call_at(self, at_s: float, callback: Callable[[], object]) -> None:
        """Calls ``callback`` at ``at_s``, or next if that is over; ties in order of the calls."""
        with self._lock:
            heapq.heappush(self._due, (at_s, self._sequence, callback))
            self._sequence += 1

    def advance(self, duration_s: float) -> None:
        """Moves time on by ``duration_s``."""
        if duration_s < 0:
            raise ValueError(f"time does not go back: {duration_s} s")
        until_s = self.now_s + duration_s
        self._call_due(until_s)
        self.now_s = until_s

    def run(self) -> None:
        """Moves time on until nothing is due any more."""
        self._call_due(float("inf"))

    def _call_due(self, until_s: float) -> None:
        while (callback := self._next_due(until_s)) is not None:
            callback()

    def _next_due(self, until_s: float) -> Callable[[], object] | None:
        with self._lock:
            if not self._due or self._due[0][0] > until_s:
                return None
            at_s, _, callback = heapq.heappop(self._due)
            self.now_s = max(self.now_s, at_s)
            return callback


class LinkTransport:
    """A link that serves tasks one after the other, in the time of a `ManualClock`.

    A task of n bytes occupies it for ``overhead_s + n / bytes_per_s`` seconds, and is across
    ``latency_s`` later, while the next one is on it already.
    """

    def __init__(
        self,
        clock: ManualClock,
        *,
        bytes_per_s: float,
        overhead_s: float = 0.0,
        latency_s: float = 0.0,
    ) -> None:
        if bytes_per_s <= 0 or overhead_s < 0 or latency_s < 0:
            raise ValueError(
                f"no such link: {bytes_per_s} bytes/s, {overhead_s} s per task, "
                f"{latency_s} s across"
            )
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._overhead_s = overhead_s
        self._latency_s = latency_s
        self._free_at_s = 0.0
        self._in_flight: dict[CommTask, Done] = {}
        self._closed = False

    def start(self, task: CommTask, done: Done) -> None:
        """Queues ``task`` behind all that was started before it."""
        if self._closed:
            raise SchedulerClosed(f"{task!r} was started on a closed link")
        begin_s = max(self._clock.now_s, self._free_at_s)
        self._free_at_s = begin_s + self._overhead_s + task.nbytes / self._bytes_per_s
        self._in_flight[task] = done
        self._clock.call_at(self._free_at_s + self._latency_s, partial(self._arrived, task))

    def close(self) -> None:
        """Tasks in flight fail with SchedulerClosed."""
        self._closed = True
        while self._in_flight:
            task, done = self._in_flight.popitem()
            done(task, SchedulerClosed(f"{task!r} was in flight when its link was closed"))

    def _arrived(self, task: CommTask) -> None:
        if (done := self._in_flight.pop(task, None)) is not None:
            done(task, None)


@dataclass(frozen=True, slots=True)
class SimulatedIteration:
    """What one iteration took, in seconds from the beginning of backward to the end of forward."""

    step_s: float
    #: when each chunk was handed to the link, in that order
    starts: tuple[tuple[float, CommTask], ...]
    #: when each chunk had crossed the link, in that order
    finishes: tuple[tuple[float, CommTask], ...]


def simulate(
    releases_s: Sequence[float],
    sizes_bytes: Sequence[int],
    forward_s: Sequence[float],
    *,
    bytes_per_s: float,
    overhead_s: float,
    partition_bytes: int,
    credit_bytes: int,
    policy: Policy,
    merge: bool = False,
    latency_s: float = 0.0,
    iterations: int = 1,
    one_operation: bool = False,
) -> SimulatedIteration:
    """One iteration of the real `SchedulerCore` over a modelled link.

    With the policy `Prophet`, releases are foreseen once a few iterations are over.

    Args:
        releases_s: when backward has computed the gradient of each layer.
        sizes_bytes: bytes of that gradient; 0 if the layer has no parameters.
        forward_s: how long the layer takes in the next forward pass.
        bytes_per_s: bandwidth of the link, which serves one chunk after the other.
        overhead_s: start-up time of a chunk on the link.
        partition_bytes: size that chunks are cut to.
        credit_bytes: window of bytes in flight.
        policy: which chunk goes first.
        merge: whether small neighbours share a chunk; else no chunk spans two layers.
        latency_s: time of a chunk on the link during which the next one may follow it.
        iterations: how many there are, of which the last one counts.
        one_operation: whether neighbours that start together are one message on the link.

    The three sequences are in the order of the forward pass, which is also that of priority.
    """
    clock = ManualClock()
    link = LinkTransport(clock, bytes_per_s=bytes_per_s, overhead_s=overhead_s, latency_s=latency_s)
    chunks = _chunks(sizes_bytes, partition_bytes, merge=merge)
    foreseen = Foreseen(len(chunks), lambda: clock.now_s) if isinstance(policy, Prophet) else None
    core = SchedulerCore(Leading(policy), credit_bytes=credit_bytes, admission=foreseen)
    chunks_of: list[list[CommTask]] = [[] for _ in sizes_bytes]
    for chunk in chunks:
        for member in chunk.members:
            chunks_of[member.priority].append(chunk)
    starts: list[tuple[float, CommTask]] = []
    finishes: list[tuple[float, CommTask]] = []
    began_s = 0.0

    def start(tasks: Sequence[CommTask]) -> None:
        for message in _messages(tasks) if one_operation else [[task] for task in tasks]:
            starts.extend((clock.now_s - began_s, task) for task in message)
            link.start(_over(message), partial(finished, message))

    def finished(message: list[CommTask], _: CommTask, error: BaseException | None) -> None:
        if error is not None:
            raise error
        finishes.extend((clock.now_s - began_s, task) for task in message)
        following: list[CommTask] = []
        for task in message:
            following += core.finish(task)
            task.rearm()
        start(following)

    def released(layer: int) -> None:
        for task in chunks_of[layer]:
            if task.notify_ready():
                start(core.ready(task))

    for _ in range(iterations):
        began_s = clock.now_s
        starts.clear()
        finishes.clear()
        for layer, release_s in enumerate(releases_s):
            clock.call_at(began_s + release_s, partial(released, layer))
        clock.run()

    arrived_s = list(releases_s)
    for at_s, task in finishes:
        for member in task.members:
            arrived_s[member.priority] = max(arrived_s[member.priority], at_s)
    step_s = 0.0
    for ready_s, duration_s in zip(arrived_s, forward_s, strict=True):
        step_s = max(step_s, ready_s) + duration_s
    return SimulatedIteration(step_s, tuple(starts), tuple(finishes))


def _messages(tasks: Sequence[CommTask]) -> list[list[CommTask]]:
    """Tasks that start together, those that touch each other in one list."""
    found: list[list[CommTask]] = []
    for task in sorted(tasks, key=lambda task: task.start_at):
        if found and found[-1][-1].stop_at == task.start_at:
            found[-1].append(task)
        else:
            found.append([task])
    return sorted(found, key=lambda message: message[0].priority)


def _over(message: list[CommTask]) -> CommTask:
    """What crosses the link."""
    first, last = message[0], message[-1]
    if first is last:
        return first
    return CommTask(first.name, start_at=first.start_at, stop_at=last.stop_at)


def _chunks(sizes_bytes: Sequence[int], partition_bytes: int, *, merge: bool) -> list[CommTask]:
    layers = []
    start_at = 0
    for layer, nbytes in enumerate(sizes_bytes):
        if nbytes:
            stop_at = start_at + nbytes
            layers.append(
                CommTask(f"layer{layer}", start_at=start_at, stop_at=stop_at, priority=layer)
            )
            start_at = stop_at
    buffers = [CommTask.merge(layers)] if merge and layers else layers
    chunks = [chunk for buffer in buffers for chunk in buffer.partition(partition_bytes)]
    for index, chunk in enumerate(chunks):
        chunk.index = index
    return chunks
