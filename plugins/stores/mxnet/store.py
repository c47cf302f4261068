"""ScheduledMXNetStore: an MXNet store whose pushes and pulls go by urgency."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import mxnet as mx

from bytesched.config import Config
from bytesched.errors import InvalidTransition, PluginError
from bytesched.kvstore.pipes import Pipes
from bytesched.kvstore.protocol import Key
from bytesched.link.sizes import RULES
from bytesched.observe import Observers

from ...registry import WrappedStore
from .channel import Announced, Channel
from .engine import Held, post
from .keys import KeySlot, new_number, pairs, published, why_whole
from .underway import Moves, Underway
from .urgency import Urgency

log = logging.getLogger("bytesched")


class ScheduledMXNetStore(WrappedStore, mx.kvstore.KVStoreBase):  # type: ignore[misc]
    """The calls of MXNet's store, with the same meaning: they return at once, the engine orders.

    A call copies the arrays, and takes the copy in the engine until it is done, so that a read of
    the result waits for it as always. In between, each key goes over the wire in chunks of about
    ``config.partition_bytes``, those of the highest priority first, with ``config.credit_bytes``
    on their way. What is not listed here is the store's own.

    Keys are cut, and made on the servers, at the first call that uses any: by then the optimizer
    is set, if the servers get one, and some optimizers need whole keys.

    Args:
        store: of a type such as ``dist_sync``, with no keys yet.
        config: policy, sizes and timeout; sizes of 0 are 256 KiB, and four chunks on their way.
        learns_order: priorities are not those of the calls: what backward computes last is needed
            first.
    """

    def __init__(
        self, store: Any, config: Config, observers: Observers, *, learns_order: bool = False
    ) -> None:
        self.store = store
        self._observers = observers
        self._slots: dict[Key, KeySlot] = {}
        #: of each `init`, the keys that the servers do not have yet
        self._unmade: list[list[KeySlot]] = []
        self._steps: dict[Key, int] = {}
        self._urgency = Urgency() if learns_order else None
        self._is_cuttable = True
        self._underway = Underway(self.rank, config.timeout_s, lambda: self._pipes.story())
        self._partition_bytes, self._credit_bytes = RULES["mxnet"].sizes(
            config.partition_bytes, config.credit_bytes
        )
        self._moves = Moves(store, self._underway.ended)
        #: worker 0's order of pushes, on its way to the others
        self._channel = Channel(
            self.rank,
            self.num_workers,
            lambda indices: self._pipes.pushes.ordered(indices),
            config.timeout_s,
        )
        leads = self.rank == 0
        self._pipes = Pipes(
            self._moves,
            policy=config.policy,
            credit_bytes=self._credit_bytes,
            timeout_s=config.timeout_s,
            on_error=self._underway.fail,
            observers=observers,
            pushes=None if leads else Announced(),
            announce=self._channel.send if leads else None,
        )
        self._underway.watch(self._moves.go_on)

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
        return int(self.store.rank)

    @property
    def num_workers(self) -> int:
        return int(self.store.num_workers)

    @property
    def error(self) -> BaseException | None:
        return self._underway.error

    @property
    def is_closed(self) -> bool:
        return self._underway.is_closed

    def is_capable(self, capability: str) -> bool:
        """Whether the store can have an optimizer."""
        return bool(self.store.is_capable(capability))

    # -- calls that block --------------------------------------------------------------

    def init(self, key: Any, value: Any) -> None:
        """Makes keys, with the values of worker 0; the servers have them when one is used."""
        self._underway.check(f"init of key {key!r}")
        slots = []
        for name, values in pairs(key, value):
            if name in self._slots:
                raise InvalidTransition(f"key {name!r} has been initialised already")
            if values[0].stype != "default":
                raise PluginError(f"key {name!r} is {values[0].stype}: only dense keys can be cut")
            slots.append(KeySlot(name, values[0]))
        self._slots.update((slot.key, slot) for slot in slots)
        if slots:
            self._unmade.append(slots)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Makes keys, with the values of worker 0, and fills ``out`` with them."""
        self.init(key, value)
        for name, outs in pairs(key, out):
            self._call("pull", name, outs, outs, priority)

    def set_optimizer(self, optimizer: Any) -> None:
        """Lets the servers update; one that looks at a whole key gets it as a whole."""
        self._underway.flush()
        why = why_whole(optimizer)
        if why and any(len(slot.chunks) > 1 for slot in self._slots.values()):
            raise PluginError(
                f"{why}, but keys have been cut: set the optimizer before the first push or pull"
            )
        if why:
            log.info("keys are not cut: %s", why)
        self._is_cuttable = not why
        set_optimizer = partial(self.store.set_optimizer, optimizer)
        self._underway.limited(set_optimizer, "set_optimizer()")

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
        self._make()
        self._underway.flush()

    def barrier(self) -> None:
        """Returns when every worker has called it and every call of this one has ended."""
        self.flush()
        self._underway.limited(self.store._barrier, "barrier()")

    def unwrap(self) -> Any:
        """The store, which has no keys yet. PluginError if it has."""
        if self._slots:
            raise PluginError(
                f"{len(self._slots)} keys have been made, in chunks, and MXNet cannot change a "
                "key: make a new store to go on without bytesched"
            )
        self.close()
        return self.store

    def close(self) -> None:
        """Stops our threads. Idempotent; what waits in the engine is let go."""
        if self.error is None and not self.is_closed:
            # The other workers need this one to make theirs.
            self._make()
        self.stop()

    def stop(self) -> None:
        """As `close`, after an error: waits for no other worker."""
        if not self._underway.begin_close():
            return
        self._pipes.close()
        self._channel.close()
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
        slot = self._slots.get(key)
        if slot is None:
            raise InvalidTransition(f"key {key!r} has not been initialised through this store")
        slot.check(call, [*arrays, *outs])
        self._make()
        if call != "pull" and slot.contexts != [array.context for array in arrays]:
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
        begin = self._pipes.pull if call == "pull" else self._pipes.push
        for chunk in slot.chunks:
            chunk.set_priority(priority)
            begin(chunk, chunk.buffers).add_done_callback(partial(self._ended, slot))

    def _ended(self, slot: KeySlot, work: Future[None]) -> None:
        # An error lets everything go.
        if work.exception() is None:
            self._underway.ended(slot)

    # -- more --------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float | str]:
        """Figures since the start, times per step."""
        steps = max(self._steps.values(), default=0)
        return {
            "steps": steps,
            **self._pipes.figures(max(steps, 1)),
            "bytes_per_step": sum(slot.nbytes for slot in self._slots.values()),
            "partition_bytes": self._partition_bytes,
            "credit_bytes": self._credit_bytes,
            "mode": "kvstore",
            "rank": self.rank,
            "world_size": self.num_workers,
        }

    def _make(self) -> None:
        """Makes the keys of every `init` so far on the servers; each takes a barrier of MXNet's."""
        if not self._unmade:
            return
        # MXNet's store is made for one thread, and pushes are made by another.
        self._underway.flush()
        if not self._pipes.chunk_count:
            self._channel.open(self._exchanged)
        unmade, self._unmade = self._unmade, []
        for slots in unmade:
            for slot in slots:
                size = self._partition_bytes if self._is_cuttable else 0
                for chunk in slot.cut(size):
                    self._moves.add(chunk.key, slot)
                    self._pipes.add(chunk)
                for buffer in slot.buffers:
                    buffer.wait_to_read()
            chunks = [chunk for slot in slots for chunk in slot.chunks]
            numbers = [chunk.key for chunk in chunks]
            init = partial(self.store.init, numbers, [chunk.buffers[0] for chunk in chunks])
            keys = ", ".join(repr(slot.key) for slot in slots[:5])
            self._underway.limited(init, f"the making of key {keys}")

    def _exchanged(self, text: str) -> str:
        """The ``text`` of worker 0, which also decides whether keys are cut."""
        text = f"{int(self._is_cuttable)} {text}"
        publish = partial(published, self.store, new_number(), text)
        cut, _, text = self._underway.limited(publish, "the start of the store").partition(" ")
        self._is_cuttable = cut == "1"
        return text

    def __repr__(self) -> str:
        return (
            f"<ScheduledMXNetStore {len(self._slots)} keys in {self._pipes.chunk_count} chunks, "
            f"worker {self.rank} of {self.num_workers}>"
        )
