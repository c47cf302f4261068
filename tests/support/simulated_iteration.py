"""An iteration of the scheduler's core over a modelled link, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bytesched.admission import Foreseen
from bytesched.core import SchedulerCore
from bytesched.link.shared import ManualClock
from bytesched.order import Leading
from bytesched.policy import Policy, Prophet
from bytesched.task import CommTask


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
    clock, free_at_s = ManualClock(), 0.0
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
        nonlocal free_at_s
        for message in _messages(tasks) if one_operation else [[task] for task in tasks]:
            starts.extend((clock.now_s - began_s, task) for task in message)
            sent_s = sum(task.nbytes for task in message) / bytes_per_s
            free_at_s = max(clock.now_s, free_at_s) + overhead_s + sent_s
            clock.call_at(free_at_s + latency_s, partial(finished, message))

    def finished(message: list[CommTask]) -> None:
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
