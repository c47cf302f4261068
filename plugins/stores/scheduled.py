"""ScheduledKVStore: any store, asynchronous, its pushes and pulls in the order of their urgency."""

from __future__ import annotations

import logging
from time import perf_counter_ns
from typing import Any

from bytesched.config import Config
from bytesched.errors import InvalidTransition, MismatchError, SchedulerClosed
from bytesched.kvstore.pipes import chunks_on_their_way
from bytesched.kvstore.protocol import Key, KVStore, describe
from bytesched.link.sizes import RULES
from bytesched.log import show
from bytesched.observe import Observers
from bytesched.trace.timeline import observers_here

from ..ending import end_when_gone
from ..registry import kind_of_store
from .transfers import KeySlot, Transfers, cut, fill, plain

__all__ = ["ScheduledKVStore", "begin"]

log = logging.getLogger("bytesched")


@kind_of_store
class ScheduledKVStore:
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
        self._transfers = Transfers(store, config, self._observers, credit_bytes=self._credit_bytes)
        self._slots, self._pipes = self._transfers.slots, self._transfers.pipes
        self._end = end_when_gone(self, self._transfers.end)
        self._closed = False
        self._steps = 0

    @property
    def error(self) -> BaseException | None:
        """The first error, which is final."""
        return self._pipes.error

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self.store.rank

    @property
    def num_workers(self) -> int:
        """How many workers push to this store."""
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
        self._transfers.add(slot)

    def push(self, key: Key, value: Any, priority: int | None = None) -> None:
        """Adds ``value`` to this step of ``key``; it may be overwritten afterwards.

        ``priority`` replaces the one of ``init`` from now on. Waits for the pull of the last step
        of ``key``, if that has not ended.
        """
        slot = self._slot(key, value, "push")
        if slot.is_pushed and slot.pulled is None:
            raise InvalidTransition(
                f"worker {self.rank} pushed key {key!r} twice in one step: pull it first"
            )
        self._transfers.wait_for(slot)
        if priority is not None:
            slot.set_priority(-priority)
        if slot.steps == self._steps:
            self._steps += 1
            if self._observers:
                self._observers.on_step(self._steps, perf_counter_ns())
        slot.steps = self._steps
        self._transfers.push(slot, value)

    def pull(self, key: Key, out: Any, priority: int | None = None) -> None:
        """Fills ``out`` with the value of ``key``; if it was pushed, `wait` before reading it."""
        slot = self._slot(key, out, "pull")
        self._transfers.wait_for(slot)
        if slot.is_pushed:
            self._transfers.pull(slot, out)
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
            self._transfers.wait_for(slot)

    def barrier(self) -> None:
        """Returns when every worker has called it and every push of this one has ended."""
        self._check("barrier")
        self.flush()
        self.store.barrier()

    def flush(self) -> None:
        """Returns when everything that was begun has ended."""
        self._transfers.wait_all()

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
        return {
            "steps": self._steps,
            **self._transfers.figures(max(self._steps, 1)),
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

    def _known(self, key: Key, what: str) -> KeySlot:
        self._check(f"{what} of key {key!r}")
        slot = self._slots.get(key)
        if slot is None:
            raise InvalidTransition(f"{what} of key {key!r}, which has not been initialised")
        return slot

    def _slot(self, key: Key, value: Any, what: str) -> KeySlot:
        slot = self._known(key, what)
        if describe(value) != slot.what:
            raise MismatchError(
                f"{what} of key {key!r} with {describe(value)}; it was initialised as {slot.what}"
            )
        return slot

    def __repr__(self) -> str:
        return (
            f"<ScheduledKVStore {len(self._slots)} keys in {self._pipes.chunk_count} chunks, "
            f"worker {self.rank} of {self.num_workers}, {self.store!r}>"
        )


def begin(store: KVStore, config: Config) -> KVStore | ScheduledKVStore:
    """A `ScheduledKVStore` around ``store``; the store itself if scheduling is off."""
    show(config.log_level, store.rank)
    if not config.enabled:
        log.info("left as it was: enabled is off")
        return store
    return ScheduledKVStore(store, config, observers_here(store.rank, config))
