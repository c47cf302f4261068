"""ScheduledKVStore: any store, asynchronous, its pushes and pulls in the order of their urgency."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from time import perf_counter_ns
from typing import Any

from bytesched.config import Config
from bytesched.errors import InvalidTransition, SchedulerClosed, in_one_line
from bytesched.kvstore.pipes import Pipes, chunks_on_their_way
from bytesched.kvstore.protocol import Key, KVStore, known
from bytesched.link.sizes import RULES
from bytesched.log import show
from bytesched.observe import Observers
from bytesched.trace.timeline import observers_here

from ..ending import end_when_gone
from ..registry import WrappedStore
from .transfers import KeySlot, cut, fill, plain

log = logging.getLogger("bytesched")

#: keys whose waits are named
_WORST = 8


class ScheduledKVStore(WrappedStore):
    """The same calls as the store's, which return at once; `wait` for a key before its use.

    Each key is cut into chunks of about ``config.partition_bytes``. A chunk's push and its pull
    are tasks of their own, each under a credit of ``config.credit_bytes``, so that pulls run
    beside pushes. In the store, the chunks of a key that is cut have names of our own.

    All workers make the same calls in the same order.

    Args:
        store: what moves the chunks; called from two threads, one for each pipe.
        config: policy, sizes and timeout; sizes of 0 are 1 MiB, and two chunks in flight, or
            six if there are several servers.
    """

    def __init__(self, store: KVStore, config: Config, observers: Observers | None = None) -> None:
        self.store = store
        self._observers = observers or Observers()
        self._partition_bytes, self._credit_bytes = RULES["store calls"].sizes(
            config.partition_bytes,
            config.credit_bytes,
            window=chunks_on_their_way(getattr(store, "num_servers", 1)),
        )
        self._slots: dict[Key, KeySlot] = {}
        self._wait_ns: Counter[str] = Counter()
        self._pipes = Pipes(
            store,
            policy=config.policy,
            credit_bytes=self._credit_bytes,
            timeout_s=config.timeout_s,
            observers=self._observers,
        )
        self._end = end_when_gone(self, partial(_end, self._slots, self._pipes, self._observers))
        self._closed = False
        self._steps = 0

    @property
    def error(self) -> BaseException | None:
        return self._pipes.error

    @property
    def rank(self) -> int:
        return self.store.rank

    @property
    def num_workers(self) -> int:
        return self.store.num_workers

    # -- the calls of a store ----------------------------------------------------------

    def init(self, key: Key, value: Any, priority: int | None = None) -> None:
        """Makes ``key``, with the value of worker 0; blocks.

        ``priority`` is that of its pushes and pulls, higher first; by default the keys go in the
        order of their ``init``.
        """
        self._check(f"init of key {key!r}")
        if key in self._slots:
            raise InvalidTransition(f"key {key!r} has been initialised already")
        number = len(self._slots)
        order = number if priority is None else -priority
        slot = cut(key, number, value, order, self._partition_bytes)
        self.flush()
        for chunk, memory in slot.chunks:
            self.store.init(chunk.key, memory)
        for chunk, _ in slot.chunks:
            self._pipes.add(chunk)
        self._slots[key] = slot

    def push(self, key: Key, value: Any, priority: int | None = None) -> None:
        """Adds ``value`` to this step of ``key``; it may be overwritten afterwards.

        ``priority`` replaces the one of ``init`` from now on. Waits for the pull of the last step
        of ``key``, if that has not ended.
        """
        slot = self._known(key, "push", value)
        if slot.is_pushed and slot.pulled is None:
            raise InvalidTransition(
                f"worker {self.rank} pushed key {key!r} twice in one step: pull it first"
            )
        self._wait_for(slot)
        if priority is not None:
            slot.set_priority(-priority)
        if slot.steps == self._steps:
            self._steps += 1
            if self._observers:
                self._observers.on_step(self._steps, perf_counter_ns())
        slot.steps = self._steps
        slot.push(self._pipes, value)

    def pull(self, key: Key, out: Any, priority: int | None = None) -> None:
        """Fills ``out`` with the value of ``key``; if it was pushed, `wait` before reading it."""
        slot = self._known(key, "pull", out)
        self._wait_for(slot)
        if slot.is_pushed:
            slot.pull(self._pipes, out)
            return
        self._read(slot)
        fill(plain(out), slot.flat.reshape(slot.shape))

    def pushpull(self, key: Key, value: Any, out: Any = None, priority: int | None = None) -> None:
        """Push, then pull into ``out``, or into ``value`` if that is None."""
        self.push(key, value, priority)
        self.pull(key, value if out is None else out)

    def wait(self, key: Key | None = None) -> None:
        """Returns when the pull of ``key``, or every pull, has filled its array."""
        self._check("wait")
        slots = list(self._slots.values()) if key is None else [self._known(key, "wait")]
        for slot in slots:
            self._wait_for(slot)

    def _wait_for(self, slot: KeySlot) -> None:
        """Returns when the pull of ``slot`` has ended, if one is under way."""
        if slot.pulled is None:
            return
        began_ns = perf_counter_ns()
        slot.wait(self._pipes)
        now_ns = perf_counter_ns()
        self._wait_ns[str(slot.key)] += now_ns - began_ns
        if self._observers:
            self._observers.on_span("wait", str(slot.key), began_ns, now_ns)

    def barrier(self) -> None:
        """Returns when every worker has called it and every push of this one has ended."""
        self._check("barrier")
        self.flush()
        self.store.barrier()

    def flush(self) -> None:
        """Returns when everything that was begun has ended."""
        for slot in self._slots.values():
            self._wait_for(slot)
        for slot in self._slots.values():
            slot.wait_pushes(self._pipes)

    def close(self) -> None:
        """Stops our threads and closes the store; pulls that have not ended never will."""
        if self._closed:
            return
        self._closed = True
        self._end.detach()
        self._pipes.close()
        self.store.close()
        self._observers.close()

    # -- more --------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float | str]:
        """Figures since the start, times per step."""
        steps = max(self._steps, 1)
        return {
            "steps": self._steps,
            "exposed_comm_ms": sum(self._wait_ns.values()) / 1e6 / steps,
            **self._pipes.figures(steps),
            **{f"wait_ms/{key}": ns / 1e6 / steps for key, ns in self._wait_ns.most_common(_WORST)},
            "bytes_per_step": sum(slot.nbytes for slot in self._slots.values()),
            "partition_bytes": self._partition_bytes,
            "credit_bytes": self._credit_bytes,
            "mode": "kvstore",
            "rank": self.rank,
            "world_size": self.num_workers,
        }

    def unwrap(self) -> KVStore:
        """The store, with every key under its own name again; every worker calls it."""
        self.flush()
        self._end.detach()
        self._pipes.close()
        for slot in self._slots.values():
            if [chunk.key for chunk, _ in slot.chunks] != [slot.key]:
                self._read(slot)
                self.store.init(slot.key, slot.flat.reshape(slot.shape))
        self._closed = True
        self._observers.close()
        return self.store

    def _read(self, slot: KeySlot) -> None:
        """Fetches the value of a key of which nothing is under way."""
        for chunk, memory in slot.chunks:
            self.store.pull(chunk.key, memory)

    # -- checks ------------------------------------------------------------------------

    def _check(self, what: str) -> None:
        if self._closed:
            raise SchedulerClosed(f"{what} on a closed store")
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _known(self, key: Key, what: str, value: Any = None) -> KeySlot:
        self._check(f"{what} of key {key!r}")
        return known(self._slots, key, what, value)

    def __repr__(self) -> str:
        return (
            f"<ScheduledKVStore {len(self._slots)} keys in {self._pipes.chunk_count} chunks, "
            f"worker {self.rank} of {self.num_workers}, {self.store!r}>"
        )


def _end(slots: dict[Key, KeySlot], pipes: Pipes, observers: Observers) -> None:
    """What is under way ends, for the sake of the other workers; then our threads."""
    try:
        for slot in slots.values():
            slot.wait(pipes)
        for slot in slots.values():
            slot.wait_pushes(pipes)
    except Exception as error:  # noqa: BLE001 - nobody is left to raise it to
        log.error("a wrapped store that was dropped: %s", in_one_line(error))
    pipes.close()
    observers.close()


def begin(store: KVStore, config: Config) -> KVStore | ScheduledKVStore:
    """A `ScheduledKVStore` around ``store``; the store itself if scheduling is off."""
    show(config.log_level, store.rank)
    if not config.enabled:
        log.info("left as it was: enabled is off")
        return store
    return ScheduledKVStore(store, config, observers_here(store.rank, config))
