"""The pushes and the pulls of one worker, each under a credit, in one order on all workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from bytesched.config import Config
from bytesched.core import SchedulerCore
from bytesched.link.sizes import RULES
from bytesched.observe import Observers
from bytesched.order import Leading, ReadyQueue
from bytesched.policy import named_policy
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask
from bytesched.transport import Transport

from .channel import Announced, Channel
from .engine_transport import Pulling, Pushing
from .keys import Chunk, KeySlot

__all__ = ["Pipes"]

#: Workers that do not choose send whatever was announced.
_NO_LIMIT = 1 << 62


class Pipes:
    """Schedules the pushes and pulls of chunks over one store.

    Args:
        store: MXNet's own.
        config: policy, sizes and timeout; sizes of 0 are 256 KiB, and four chunks on their way.
        ended: called, on any thread, for the slot of each task that has ended, and once more for
            each answer to a push.
        failed: called with the first error of each pipe.
    """

    def __init__(
        self,
        store: Any,
        config: Config,
        observers: Observers,
        *,
        ended: Callable[[KeySlot], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.partition_bytes, self.credit_bytes = RULES["mxnet"].sizes(
            config.partition_bytes, config.credit_bytes
        )
        self.chunks: list[Chunk] = []
        #: worker 0's order of pushes, on its way to the others
        self.channel = Channel(store.rank, store.num_workers, self._announced, config.timeout_s)
        calling = threading.Lock()

        def scheduler(
            transport: Transport,
            queue: ReadyQueue,
            credit_bytes: int,
            announce: Callable[[Sequence[CommTask]], None] = lambda tasks: None,
        ) -> Scheduler:
            return Scheduler(
                SchedulerCore(queue, credit_bytes=credit_bytes),
                transport,
                announce=announce,
                on_finish=lambda task: ended(self.chunks[task.index].slot),
                on_error=failed,
                observers=observers,
            )

        def chosen() -> ReadyQueue:
            return Leading(named_policy(config.policy))

        self._pushing = Pushing(store, self.chunks, calling, lambda chunk: ended(chunk.slot))
        if store.rank == 0:
            self._pushes = scheduler(self._pushing, chosen(), self.credit_bytes, self.channel.send)
        else:
            self._pushes = scheduler(self._pushing, Announced(), _NO_LIMIT)
        pulling = Pulling(store, self.chunks, calling)
        self._pulls = scheduler(pulling, chosen(), self.credit_bytes)

    def add(self, chunks: Sequence[Chunk]) -> None:
        """More chunks; all workers add the same ones."""
        for chunk in chunks:
            chunk.push_task.index = chunk.pull_task.index = len(self.chunks)
            self.chunks.append(chunk)

    def begin(self, slot: KeySlot, call: str, priority: int) -> None:
        """The chunks of ``slot`` are ready for ``call``; a pushpull is a push with its answer."""
        for chunk in slot.chunks:
            chunk.push_task.priority = chunk.pull_task.priority = priority
            is_pull = call == "pull"
            task = chunk.pull_task if is_pull else chunk.push_task
            task.notify_ready()
            (self._pulls if is_pull else self._pushes).notify_ready(task)

    def go_on(self) -> None:
        """See `Pushing.go_on`."""
        self._pushing.go_on()

    def story(self) -> list[str]:
        """The last events of both, for an error's message."""
        return [*self._pushes.core.story().splitlines(), *self._pulls.core.story().splitlines()]

    def figures(self, steps: int) -> dict[str, int | float]:
        """Figures since the start, times per step."""
        pipes = (self._pushes, self._pulls)
        started = sum(pipe.tasks_started for pipe in pipes)
        return {
            "push_ms": self._pushes.busy_ns / 1e6 / steps,
            "pull_ms": self._pulls.busy_ns / 1e6 / steps,
            "chunks": len(self.chunks),
            "partition_bytes": self.partition_bytes,
            "credit_bytes": self.credit_bytes,
            "scheduler_cpu_us_per_chunk": sum(p.cpu_ns for p in pipes) / 1e3 / max(started, 1),
        }

    def close(self) -> None:
        """Stops both, and ends the connections. Idempotent."""
        self._pushes.close()
        self._pulls.close()
        self.channel.close()

    def _announced(self, indices: Sequence[int]) -> None:
        self._pushes.ordered(indices)
