"""A store that the user drives himself, scheduled."""

from __future__ import annotations

import logging

from bytesched.config import Config
from bytesched.kvstore.protocol import KVStore
from bytesched.log import show
from bytesched.trace.timeline import observers_here

from .store import ScheduledKVStore

__all__ = ["begin"]

log = logging.getLogger("bytesched")


def begin(store: KVStore, config: Config) -> KVStore | ScheduledKVStore:
    """A `ScheduledKVStore` around ``store``; the store itself if scheduling is off."""
    show(config.log_level, store.rank)
    if not config.enabled:
        log.info("left as it was: enabled is off")
        return store
    return ScheduledKVStore(store, config, observers_here(store.rank, config))
