"""A KVStore as a carrier: a chunk is a key, which is pushed, and pulled when it has been."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

from bytesched.busy import Busy
from bytesched.errors import PluginError
from bytesched.kvstore.pipes import Chunk, Pipes
from bytesched.kvstore.protocol import Key
from bytesched.observe import Observers
from bytesched.task import CommTask
from bytesched.tunable import Setting

from ...layout.packing import Packer
from ...layout.plan import Plan
from ...routes.carrier import Traffic
from ...routes.streams import Streams

__all__ = ["StoreCarrier"]


class StoreCarrier:
    """Chunks through two pipes (see carrier.Carrier).

    A store sums key by key, so that workers need no common order.

    Args:
        keys: of the chunks, made already.
    """

    order = "each worker's own"

    def __init__(
        self,
        store: Any,
        keys: Sequence[Key],
        plan: Plan,
        packer: Packer,
        streams: Streams,
        setting: Setting,
        *,
        reduced: Callable[[CommTask], None],
        failed: Callable[[BaseException], None],
        observers: Observers,
    ) -> None:
        self._packer = packer
        self._streams = streams
        self._reduced = reduced
        self._observers = observers
        self._ready_at: dict[int, int] = {}
        self._started_at: dict[int, int] = {}
        self._busy = Busy()
        self._chunks = []
        for key, task in zip(keys, plan.chunks, strict=True):
            memory = packer.memory(task)
            self._chunks.append(Chunk(key, task, memory, memory, asked_for=()))
        self._pipes = Pipes(
            store,
            self._chunks,
            policy=setting.policy,
            push_credit_bytes=setting.credit_bytes,
            pull_credit_bytes=setting.credit_bytes,
            on_push=self._push,
            on_pulled=self._pulled,
            on_error=failed,
        )

    @property
    def traffic(self) -> Traffic:
        pushes, pulls = self._pipes.pushes, self._pipes.pulls
        cpu_ns = pushes.cpu_ns + pulls.cpu_ns
        return Traffic(self._busy.total_ns, pushes.tasks_started, pushes.bytes_started, cpu_ns)

    def submit(self, chunk: CommTask) -> None:
        now_ns = self._ready_at[chunk.index] = perf_counter_ns()
        # Here, not when its push begins: the pipes' thread is what the link waits for.
        with self._streams.communication(chunk):
            self._packer.pack(chunk)
        self._pipes.push(self._chunks[chunk.index])
        if self._observers:
            self._observers.on_flow("s", chunk.index, "backward", now_ns)

    def change(self, setting: Setting) -> None:
        raise PluginError(f"the chunks of a store stay as they are: {setting}")

    def story(self) -> str:
        return self._pipes.story()

    def close(self) -> None:
        self._pipes.close()

    # -- the pipes' thread -------------------------------------------------------------

    def _push(self, chunk: Chunk) -> None:
        task = chunk.push_task
        now_ns = perf_counter_ns()
        self._busy.begins(now_ns)
        self._started_at[task.index] = now_ns
        if self._observers:
            args = {"chunk": task.index}
            self._observers.on_span("queue", task.name, self._ready_at[task.index], now_ns, args)
            self._observers.on_flow("t", task.index, "send", now_ns)

    def _pulled(self, chunk: Chunk) -> None:
        task = chunk.push_task
        with self._streams.completion(task):
            self._packer.receive(task)
        self._packer.let_go(task)
        now_ns = perf_counter_ns()
        started_ns = self._started_at.pop(task.index)
        self._busy.ends(now_ns)
        if self._observers:
            args = {"bytes": task.nbytes, "chunk": task.index}
            self._observers.on_span("send", task.name, started_ns, now_ns, args)
        self._reduced(task)
