"""The framework side of bytesched: ``wrap`` and the plugins it chooses from."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

if __name__ != "bytesched.plugins":
    raise ImportError(
        f"imported as {__name__!r}: this folder is the package bytesched.plugins; "
        "import it under that name, or there would be two copies of its classes"
    )

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.log import show
from bytesched.observe import Observers
from bytesched.policy import named_policy
from bytesched.tunable import find_tuner

if TYPE_CHECKING:
    from bytesched.plugins.wrapped import Wrapped

__all__ = ["flush", "stats", "unwrap", "wrap"]

log = logging.getLogger("bytesched")

#: id of what is wrapped -> itself (kept alive) and its session
_wrapped: dict[int, tuple[Any, Wrapped]] = {}

_pid = os.getpid()


def wrap(optimizer: Any, model: Any = None, kvstore: Any = None, **fields: Any) -> Any:
    """See :func:`bytesched.wrap`."""
    config = Config.load(**fields)
    named_policy(config.policy)
    # What is wrong with it is known before the first collective, on every rank.
    find_tuner(config)
    if model is None and type(optimizer).__module__.split(".")[0] == "mxnet":
        from bytesched.plugins.mxnet import begin as mxnet

        return mxnet.begin(optimizer, config)
    if model is None and all(hasattr(optimizer, name) for name in ("init", "push", "pull")):
        return _wrap_store(optimizer, config)
    try:
        import torch
    except ImportError as error:
        raise PluginError("wrapping needs PyTorch: pip install 'bytesched[torch]'") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PluginError(f"{type(optimizer).__name__} is neither a torch optimizer nor a KVStore")
    if not isinstance(model, torch.nn.Module):
        raise PluginError(f"{type(model).__name__} is not a torch module")
    if id(optimizer) in _wrapped:
        raise PluginError("this optimizer is wrapped already; unwrap it first")
    session: Wrapped | None
    if kvstore is not None:
        from bytesched.plugins.kvstore.training import begin as kvstore_training

        session = kvstore_training.begin(optimizer, model, kvstore, config)
    elif _is_horovod(optimizer):
        from bytesched.plugins.horovod import optimizer as horovod

        session = horovod.begin(optimizer, model, config)
    else:
        from bytesched.plugins.c10d import ddp

        others = [other for _, other in _wrapped.values()]
        session = ddp.begin(optimizer, model, config, others, is_configured=bool(fields))
    if session is not None:
        _wrapped[id(optimizer)] = (optimizer, session)
        # Handlers run last in, first out: ours goes before that of what carries the session.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
    return optimizer


def _is_horovod(optimizer: Any) -> bool:
    return "horovod.torch" in sys.modules and hasattr(optimizer, "_allreduce_grad_async")


def _wrap_store(store: Any, config: Config) -> Any:
    show(config.log_level, store.rank)
    if not config.enabled:
        log.info("left as it was: enabled is off")
        return store
    from bytesched.plugins.kvstore.scheduled import ScheduledKVStore

    observers = Observers()
    if config.timeline:
        from bytesched.trace.timeline import Timeline

        # Nothing but the store connects the workers: each host's own clock has to do.
        observers = Observers([Timeline(config.timeline, rank=store.rank, clock_offset_ns=0)])
    return ScheduledKVStore(store, config, observers)


def _scheduled_store(x: Any) -> Any:
    """The scheduled store that ``x`` is, or that a trainer of Gluon trains through, or None."""
    settings = getattr(x, "_kvstore_params", None)
    store = settings["kvstore"] if isinstance(settings, dict) else x
    kinds = (("kvstore.scheduled", "ScheduledKVStore"), ("mxnet.store", "ScheduledMXNetStore"))
    for name, kind in kinds:
        module = sys.modules.get(f"bytesched.plugins.{name}")
        if module is not None and isinstance(store, getattr(module, kind)):
            return store
    return None


def flush(x: Any = None) -> None:
    """See :func:`bytesched.flush`."""
    if (store := _scheduled_store(x)) is not None:
        store.flush()
    for session in _sessions(x):
        session.flush()


def stats(x: Any = None) -> dict[str, int | float | str]:
    """See :func:`bytesched.stats`."""
    if (store := _scheduled_store(x)) is not None:
        figures: dict[str, int | float | str] = store.stats()
        return figures
    for session in _sessions(x):
        return session.stats()
    return {"mode": "plain"}


def unwrap(x: Any) -> Any:
    """See :func:`bytesched.unwrap`."""
    if (store := _scheduled_store(x)) is not None:
        plain = store.unwrap()
        if store is x:
            return plain
        x._kvstore_params["kvstore"] = plain
        return x
    for session in _sessions(x):
        try:
            session.flush()
        finally:
            session.close()
            for key in [key for key, (_, s) in _wrapped.items() if s is session]:
                del _wrapped[key]
    return x


def session_of(x: Any) -> Wrapped | None:
    """The session of an optimizer or a model, if ``wrap`` was called on it."""
    return next(iter(_sessions(x)), None)


def _sessions(x: Any) -> list[Wrapped]:
    """The sessions of an optimizer or a model, or all of them."""
    found: list[Wrapped] = []
    for optimizer, session in _wrapped.values():
        if (x is None or x is optimizer or x is session.root) and session not in found:
            found.append(session)
    return found


@atexit.register
def _at_exit() -> None:
    """Applies the last step; after an uncaught exception only stops."""
    if os.getpid() != _pid:
        # A forked child has the sessions of its parent, but none of their threads.
        return
    died = getattr(sys, "last_value", None)
    for session in _sessions(None):
        try:
            if died is None and session.error is None:
                session.flush()
            elif died is not None:
                session.fail(died)
        except Exception:
            log.exception("the last step could not be applied")
        _close(session)
    _wrapped.clear()


def _close(session: Wrapped) -> None:
    try:
        # After an error, what was not updated shall not be read as if it had been.
        session.close(release_parameters=session.error is None)
    except Exception:
        log.exception("%r could not be closed", session)
