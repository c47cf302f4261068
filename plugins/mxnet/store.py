"""ScheduledMXNetStore: an MXNet store whose pushes and pulls go by urgency."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mxnet as mx

from bytesched.config import Config
from bytesched.core import SchedulerCore
from bytesched.environment import mxnet_servers
from bytesched.errors import InvalidTransition, PluginError
from bytesched.kvstore.protocol import Key
from bytesched.link.sizes import RULES
from bytesched.observe import Observers
from bytesched.order import Leading, ReadyQueue
from bytesched.plugins.mxnet.engine import Held, post
from bytesched.plugins.mxnet.keys import KeySlot, Piece, ServerKeys, pairs, published
from bytesched.plugins.mxnet.optimizers import why_whole
from bytesched.plugins.mxnet.order import Orders, Told
from bytesched.plugins.mxnet.transport import Pulling, Pushing
from bytesched.plugins.mxnet.underway import Underway
from bytesched.plugins.mxnet.urgency import Urgency
from bytesched.plugins.registry import kind_of_store
from bytesched.policy import named_policy
from bytesched.scheduler import Scheduler
from bytesched.task import CommTask
from bytesched.transport import Transport

__all__ = ["ScheduledMXNetStore"]

log = logging.getLogger("bytesched")

#: Workers that do not choose send whatever they were told.
_NO_LIMIT = 1 << 62


@kind_of_store
class ScheduledMXNetStore(mx.kvstore.KVStoreBase):  # type: ignore[misc]
    """The calls of MXNet's store, with the same meaning: they return at once, the engine orders.

    A call copies the arrays, and takes the copy in the engine until it is done, so whoever reads
    the result waits for it as always. In between, each key goes over the wire in pieces of about
    ``config.partition_bytes``, those of the highest priority first, with ``config.credit_bytes``
    on their way. What is not listed here is the store's own.

    Args:
        store: of a type such as ``dist_sync``, with no keys yet.
        config: policy, sizes and timeout; sizes of 0 are 256 KiB, and four pieces on their way.
        learns_order: priorities are not those of the calls: what backward computes last is needed
            first.
    """

    def __init__(
        self, store: Any, config: Config, observers: Observers, *, learns_order: bool = False
    ) -> None:
        self.store = store
        self._observers = observers
        self._slots: dict[Key, KeySlot] = {}
        self._pieces: list[Piece] = []
        self._numbers = ServerKeys(mxnet_servers())
        self._partition_bytes, self._credit_bytes = RULES["mxnet"].sizes(
            config.partition_bytes, config.credit_bytes
        )
        self._steps: dict[Key, int] = {}
        self._urgency = Urgency() if learns_order else None
        self._is_cuttable = True
        self._underway = Underway(self.rank, config.timeout_s, self._story)
        ended = self._underway.ended
        calling = threading.Lock()
        self._pushing = Pushing(store, self._pieces, calling, lambda piece: ended(piece.slot))
        policy = Leading(named_policy(config.policy))
        self._orders = Orders(self.rank, self.num_workers, self._heard, config.timeout_s)
        if self.rank == 0:
            self._pushes = self._scheduled(
                self._pushing, policy, self._credit_bytes, self._orders.tell
            )
        else:
            self._pushes = self._scheduled(self._pushing, Told(), _NO_LIMIT)
        pulling = Pulling(store, self._pieces, calling)
        policy = Leading(named_policy(config.policy))
        self._pulls = self._scheduled(pulling, policy, self._credit_bytes)
        self._underway.watch(self._pushing.go_on)

    def _scheduled(
        self,
        transport: Transport,
        queue: ReadyQueue,
        credit_bytes: int,
        announce: Callable[[Sequence[CommTask]], None] = lambda tasks: None,
    ) -> Scheduler:
        return Scheduler(
            SchedulerCore(queue, credit_bytes=credit_bytes),
            transport,
            announce=announce,
            on_finish=lambda task: self._underway.ended(self._pieces[task.index].slot),
            on_error=self._underway.fail,
            observers=self._observers,
        )

    def __getattr__(self, name: str) -> Any:
        # Private names are asked for before there is a store, by copy and pickle.
        if name.startswith("__") or name == "store":
            raise AttributeError(name)
        return getattr(self.store, name)

    @property
    def type(self) -> str:
        """That of the store, such as ``dist_sync``."""
        return str(self.store.type)

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return int(self.store.rank)

    @property
    def num_workers(self) -> int:
        """How many workers push to this store."""
        return int(self.store.num_workers)

    @property
    def error(self) -> BaseException | None:
        """The first error, which is final."""
        return self._underway.error

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._underway.is_closed

    def is_capable(self, capability: str) -> bool:
        """Whether the store can have an optimizer."""
        return bool(self.store.is_capable(capability))

    # -- calls that block --------------------------------------------------------------

    def init(self, key: Any, value: Any) -> None:
        """Makes keys, with the values of worker 0."""
        self._make(pairs(key, value))

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Makes keys, with the values of worker 0, and fills ``out`` with them."""
        self._make(pairs(key, value))
        for name, outs in pairs(key, out):
            self._call("pull", name, outs, outs, priority)

    def set_optimizer(self, optimizer: Any) -> None:
        """Lets the servers update; one that looks at a whole key gets it as a whole."""
        self.flush()
        why = why_whole(optimizer)
        if why and any(len(slot.pieces) > 1 for slot in self._slots.values()):
            raise PluginError(f"{why}, but keys have been cut: set the optimizer before `init`")
        if why:
            log.info("keys are not cut: %s", why)
        self._is_cuttable = not why
        self.store.set_optimizer(optimizer)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """As the store does, or refuses to."""
        self.flush()
        self.store.save_optimizer_states(fname, dump_optimizer)

    def load_optimizer_states(self, fname: str) -> None:
        """As the store does, or refuses to."""
        self.flush()
        self.store.load_optimizer_states(fname)

    def flush(self) -> None:
        """Returns when every call made so far has ended."""
        self._underway.flush()

    def barrier(self) -> None:
        """Returns when every worker has called it and every call of this one has ended."""
        self.flush()
        self.store._barrier()

    def unwrap(self) -> Any:
        """The store, which has no keys yet. PluginError if it has."""
        if self._slots:
            raise PluginError(
                f"the servers know {len(self._slots)} keys in pieces, and MXNet cannot change a "
                "key: make a new store to go on without bytesched"
            )
        self.close()
        return self.store

    def close(self) -> None:
        """Stops our threads. Idempotent; what waits in the engine is let go."""
        if not self._underway.begin_close():
            return
        self._pushes.close()
        self._pulls.close()
        self._orders.close()
        self._underway.close()
        self._observers.close()

    # -- calls that the engine orders --------------------------------------------------

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Adds values to this step of their keys."""
        for name, values in pairs(key, value):
            self._call("push", name, values, (), priority)

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Fills ``out`` with the values of keys."""
        for name, outs in pairs(key, out):
            self._call("pull", name, outs, outs, priority)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push, then pull into ``out``, or into ``value`` if that is None."""
        outs = dict(pairs(key, value if out is None else out))
        for name, values in pairs(key, value):
            self._call("pushpull", name, values, outs[name], priority)

    def _call(
        self, call: str, key: Key, arrays: Sequence[Any], outs: Sequence[Any], priority: int
    ) -> None:
        self._underway.check(f"{call} of key {key!r}")
        slot = self._slot(key)
        slot.check(call, [*arrays, *outs])
        if call != "pull" and not slot.is_placed(arrays):
            self.flush()
            slot.place(arrays)
        self._underway.add()
        if call != "pull":
            self._steps[key] = self._steps.get(key, 0) + 1
            if self._urgency is not None:
                self._urgency.called(key, self._steps[key])
            slot.take(arrays)
        step = self._steps.get(key, 0)
        post(partial(self._began, slot, call, step, -priority), writes=slot.buffers)
        slot.give(outs)

    # -- from threads of the engine and of the scheduler -------------------------------

    def _began(self, slot: KeySlot, call: str, step: int, priority: int, held: Held) -> None:
        """Its buffers are free, and filled if it is a push."""
        if not self._underway.begin(slot, call, held):
            return
        if self._urgency is not None and call != "pull":
            priority = self._urgency.began(slot.key, step, priority)
        for piece in slot.pieces:
            piece.push_task.priority = piece.pull_task.priority = priority
            if call == "pull":
                piece.pull_task.notify_ready()
                self._pulls.notify_ready(piece.pull_task)
            else:
                piece.push_task.notify_ready()
                self._pushes.notify_ready(piece.push_task)

    def _heard(self, indices: Sequence[int]) -> None:
        """Worker 0 begins these pushes."""
        self._pushes.ordered(indices)

    # -- more --------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float | str]:
        """Figures since the start, times per step."""
        steps = max(self._steps.values(), default=0)
        pipes = (self._pushes, self._pulls)
        started = sum(pipe.tasks_started for pipe in pipes)
        return {
            "steps": steps,
            "push_ms": self._pushes.busy_ns / 1e6 / max(steps, 1),
            "pull_ms": self._pulls.busy_ns / 1e6 / max(steps, 1),
            "bytes_per_step": sum(slot.nbytes for slot in self._slots.values()),
            "chunks": len(self._pieces),
            "partition_bytes": self._partition_bytes,
            "credit_bytes": self._credit_bytes,
            "scheduler_cpu_us_per_chunk": sum(p.cpu_ns for p in pipes) / 1e3 / max(started, 1),
            "mode": "kvstore",
            "rank": self.rank,
            "world_size": self.num_workers,
        }

    def _story(self) -> list[str]:
        return [*self._pushes.core.story().splitlines(), *self._pulls.core.story().splitlines()]

    def _make(self, initial: Sequence[tuple[Key, Sequence[Any]]]) -> None:
        self.flush()
        for key, values in initial:
            if key in self._slots:
                raise InvalidTransition(f"key {key!r} has been initialised already")
            if values[0].stype != "default":
                raise PluginError(f"key {key!r} is {values[0].stype}: only dense keys can be cut")
        if initial and not self._slots:
            self._orders.open(partial(published, self.store, self._numbers.new()))
        for key, values in initial:
            slot = KeySlot(key, values[0])
            size = self._partition_bytes if self._is_cuttable else 0
            for piece in slot.cut(size, self._numbers.new, self._numbers.of(key)):
                piece.push_task.index = piece.pull_task.index = len(self._pieces)
                self._pieces.append(piece)
            self._slots[key] = slot
            slot.place(values[:1])
            slot.take(values[:1])
            for buffer in slot.buffers:
                buffer.wait_to_read()
            self.store.init(
                [piece.number for piece in slot.pieces],
                [piece.buffers[0] for piece in slot.pieces],
            )

    def _slot(self, key: Key) -> KeySlot:
        slot = self._slots.get(key)
        if slot is None:
            raise InvalidTransition(f"key {key!r} has not been initialised through this store")
        return slot

    def __repr__(self) -> str:
        return (
            f"<ScheduledMXNetStore {len(self._slots)} keys in {len(self._pieces)} pieces, "
            f"worker {self.rank} of {self.num_workers}>"
        )
