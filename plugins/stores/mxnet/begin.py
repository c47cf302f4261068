"""MXNet's parameter server: a store, or a Gluon trainer that has one."""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Any

import mxnet as mx

from bytesched.config import Config
from bytesched.environment import mxnet_engine
from bytesched.errors import PluginError
from bytesched.log import show
from bytesched.trace.timeline import observers_here

from ...ending import at_exit, died_of, make_exit_fail
from .store import ScheduledMXNetStore

log = logging.getLogger("bytesched")

_SUPPORTED = "1.9.1"
_stores: weakref.WeakSet[ScheduledMXNetStore] = weakref.WeakSet()


def begin(subject: Any, config: Config) -> Any:
    """A scheduled store for a store; for a trainer itself, from now on with a scheduled store.

    What has nothing to schedule comes back as it was, with the reason in the log. PluginError for
    anything else of MXNet, and for a trainer that has begun to train.
    """
    if isinstance(subject, mx.gluon.Trainer):
        return _trainer(subject, config)
    if isinstance(subject, mx.kv.KVStore):
        return _store(subject, config)
    raise PluginError(
        f"a {type(subject).__name__} of MXNet is neither a KVStore nor a gluon.Trainer"
    )


def _trainer(trainer: Any, config: Config) -> Any:
    if trainer._kv_initialized:
        raise PluginError("this trainer has begun to train: wrap it before its first step")
    settings = trainer._kvstore_params
    store = settings["kvstore"]
    if trainer._contains_sparse_weight or trainer._contains_sparse_grad:
        log.info("left as it was: the trainer has sparse parameters or gradients")
        return trainer
    if isinstance(store, str) and "dist" in store:
        store = mx.kv.create(store)
    if isinstance(store, mx.kv.KVStore):
        # A trainer sorts a dict of parameters by name, and takes that for the order of the layers.
        store = _store(store, config, learns_order=True)
    else:
        log.info("left as it was: kvstore %r stays within this process", store)
    settings["kvstore"] = store
    return trainer


def _store(store: Any, config: Config, *, learns_order: bool = False) -> Any:
    show(config.log_level, store.rank)
    is_naive, version = mxnet_engine() == "NaiveEngine", mx.__version__
    reasons = {
        "enabled is off": not config.enabled,
        f"a store of type {store.type!r} stays within this process": "dist" not in store.type,
        "DMLC_PS_VAN_TYPE=p3 schedules already": getattr(store, "_is_p3", False),
        "MXNET_ENGINE_TYPE=NaiveEngine runs one operation at a time": is_naive,
        f"MXNet is {version}, and this needs the engine of {_SUPPORTED}": version != _SUPPORTED,
    }
    if why := next((why for why, is_so in reasons.items() if is_so), ""):
        log.info("left as it was: %s", why)
        return store
    observers = observers_here(store.rank, config)
    scheduled = ScheduledMXNetStore(store, config, observers, learns_order=learns_order)
    _stores.add(scheduled)
    return scheduled


def _at_exit() -> None:
    """Before MXNet's own end, which waits for everything; after an exception only stops."""
    for store in list(_stores):
        if store.error is None and not store.is_closed and died_of() is None:
            try:
                store.flush()
            except Exception:
                log.exception("the last calls of %r could not be ended", store)
                make_exit_fail()
        if store.error is not None:
            # It would wait for ever. Without it, MXNet's threads end the process by an abort.
            atexit.unregister(mx.base._notify_shutdown)
        store.stop()


at_exit(_at_exit)
