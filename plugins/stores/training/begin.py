"""PyTorch through a KVStore: the gradients of a plain module, averaged by the store."""

from __future__ import annotations

import itertools
import logging
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.kvstore.pipes import chunks_on_their_way
from bytesched.link.bound import partition_seed_bytes
from bytesched.link.sizes import RULES
from bytesched.log import show
from bytesched.trace.timeline import observers_of
from bytesched.tunable import Setting

from ...agree import agree, statements
from ...planned.beginning import add_optimizer, slots_of, stays_plain, why_whole
from ...planned.bundles import Slot
from ...planned.terms import Terms
from ...update.separable import is_elementwise
from ..scheduled import ScheduledKVStore
from .owner import hyperparameters_of
from .session import StoreSession, UpdatedSession
from .wire import StoreWire

log = logging.getLogger("bytesched")

#: of the measurement of a rate
_PROBE_BYTES: Final = 2**20
_ROUNDS: Final = 3

#: the sessions of each store, in the order of wrapping, which is the same on all workers
_sessions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def why_plain(store: Any) -> str:
    """Why gradients need not travel at all; empty if they must."""
    return "there is one worker" if store.num_workers == 1 else ""


def begin(
    optimizer: torch.optim.Optimizer, model: nn.Module, store: Any, config: Config
) -> StoreSession | None:
    """What stands behind the wrapped optimizer; None if it stays as it was. Collective."""
    show(config.log_level, store.rank)
    if stays_plain(type(store).__name__, why_plain(store)):
        return None
    if not config.enabled:
        # Left plain, gradients would not be averaged at all.
        log.info("enabled is off: gradients go in the order of backward, and step() waits for all")
        config = replace(config, policy="fifo", cross_barrier=False)
    return attach(optimizer, model, store, config)


def attach(
    optimizer: torch.optim.Optimizer, model: nn.Module, store: Any, config: Config
) -> StoreSession:
    """A session for ``model`` whose gradients ``store`` sums, with ``optimizer``; collective.

    If the store was opened with ``updates``, the optimizer is the store's from now on.
    Parameters and buffers become those of worker 0.
    """
    if isinstance(store, ScheduledKVStore):
        raise PluginError("give wrap the store itself: the session schedules its chunks")
    if getattr(store, "is_stateful", False):
        raise PluginError(
            "the store has an optimizer already; to give it this one, open it with updates=True"
        )
    updates = bool(getattr(store, "updates", False))
    slots = slots_of(model, optimizer, kind=Slot)
    for slot in slots:
        if slot.parameter.device.type != "cpu":
            raise PluginError(
                f"parameter {slot.name!r} is on {slot.parameter.device}: a store sends from the "
                "host's memory; use DistributedDataParallel or Horovod"
            )
    number = _sessions[store] = _sessions.get(store, -1) + 1
    wire = StoreWire(store, name=f"bytesched/{number}", config=config)
    with ExitStack() as half_attached:
        half_attached.callback(wire.close)
        agree(statements(slots, optimizer, config), wire.rank, wire.gather_text)
        config = _sized(config, slots, wire)
        wire.limit(config.credit_bytes)
        wire.broadcast([t.detach() for t in itertools.chain(model.parameters(), model.buffers())])
        if updates:
            _refuse_in_store(optimizer, slots, config)
        terms = Terms(
            slots,
            # The wire itself puts what is ready in order, so that there is nothing to plan.
            replace(config, policy="fifo"),
            wire,
            observers_of(wire, config),
            Setting(config.partition_bytes, config.credit_bytes, config.policy),
        )
        session: StoreSession
        if updates:
            session = UpdatedSession(model, terms, optimizer, wire)
        else:
            session = StoreSession(
                model, terms, sync=lambda: True, find_unused=config.find_unused_parameters
            )
        half_attached.callback(session.close)
        why = why_whole(model, optimizer, type(optimizer), config)
        add_optimizer(session, optimizer, type(optimizer), why)
        if updates:
            wire.store.set_optimizer(type(optimizer).__name__, **hyperparameters_of(optimizer))
        half_attached.pop_all()
    return session


def _refuse_in_store(optimizer: torch.optim.Optimizer, slots: list[Slot], config: Config) -> None:
    """Raises PluginError for what a store cannot update."""
    if not is_elementwise(type(optimizer)):
        raise PluginError(
            f"{type(optimizer).__name__} cannot update parts of a parameter: let the workers "
            "update (updates=False)"
        )
    if config.share:
        raise PluginError(
            "share is not for a store that updates: let the workers update, or drop it"
        )
    if config.compression != "none":
        raise PluginError("a store that updates sends parameters, which are not compressed")
    managed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if strays := [slot.name for slot in slots if id(slot.parameter) not in managed]:
        raise PluginError(f"a store that updates, updates all: {strays[0]!r} has no optimizer")


def _sized(config: Config, slots: list[Slot], wire: StoreWire) -> Config:
    """``config`` with the sizes of chunks and windows that it leaves open; collective."""
    servers = max(getattr(wire.store, "num_servers", 1), 1)
    rule, chunks = RULES["store"], chunks_on_their_way(servers)
    best_bytes = 0
    if not config.partition_bytes:
        best_bytes = partition_seed_bytes(
            total_bytes=sum(slot.parameter.nbytes for slot in slots),
            overhead_s=rule.overhead_s,
            bytes_per_s=push_bytes_per_s(wire, servers),
            credit_partitions=2 * chunks + 2,
        )
    partition_bytes, credit_bytes = rule.sizes(
        config.partition_bytes, config.credit_bytes, best_bytes=best_bytes, window=chunks
    )
    return replace(config, partition_bytes=partition_bytes, credit_bytes=credit_bytes)


def push_bytes_per_s(wire: StoreWire, servers: int) -> float:
    """The rate of one worker's pushes, the same on all workers; collective.

    As many keys as servers are pushed, and pulled when they are there: every byte passes twice.
    """
    probes = {f"probe-{number}": torch.zeros(_PROBE_BYTES // 4) for number in range(servers)}
    for key, probe in probes.items():
        # Makes the key, and opens a connection.
        wire.sum(probe, key)
    rounds_s = []
    for _ in range(_ROUNDS):
        # The sum before has ended everywhere at nearly the same moment.
        began_s = perf_counter()
        for work in [wire.start(probe, key) for key, probe in probes.items()]:
            wire.wait(work, "probe")
        rounds_s.append(perf_counter() - began_s)
    for key in reversed(probes):
        wire.forget(key)
    mine = 2 * servers * _PROBE_BYTES / min(rounds_s)
    # A worker that starts late sees a free link.
    return min(float(text) for text in wire.gather_text("rate", repr(mine)))
