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
from bytesched.policy import named_policy

if TYPE_CHECKING:
    from bytesched.plugins.session import Session

__all__ = ["flush", "stats", "unwrap", "wrap"]

log = logging.getLogger("bytesched")

#: id of a wrapped optimizer -> the optimizer (kept alive) and its session
_wrapped: dict[int, tuple[Any, Session]] = {}

_pid = os.getpid()


def wrap(optimizer: Any, model: Any, **fields: Any) -> Any:
    """See :func:`bytesched.wrap`."""
    config = Config.load(**fields)
    named_policy(config.policy)
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise PluginError("wrapping needs PyTorch: pip install 'bytesched[torch]'") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PluginError(f"{type(optimizer).__name__} is not a torch optimizer")
    if not isinstance(model, torch.nn.Module):
        raise PluginError(f"{type(model).__name__} is not a torch module")
    if id(optimizer) in _wrapped:
        raise PluginError("this optimizer is wrapped already; unwrap it first")
    if not dist.is_available() or not dist.is_initialized():
        raise PluginError("torch.distributed is not initialized: call init_process_group first")
    from bytesched.plugins import ddp

    show(config.log_level, dist.get_rank())
    why = "enabled is off" if not config.enabled else ""
    why = why or ddp.why_plain(model)
    if why:
        log.info("left as it was: %s", why)
        return optimizer
    for _, session in _wrapped.values():
        if session.root is model:
            if fields:
                log.warning("this model is wrapped already: the settings of then hold")
            break
    else:
        session = ddp.attach(optimizer, model, config)
    why = ddp.why_whole(optimizer, model, config)
    if why:
        log.info("scheduling inside backward, stepping whole: %s", why)
    try:
        session.add_optimizer(optimizer, cross=not why)
    except PluginError:
        if all(other is not session for _, other in _wrapped.values()):
            session.close()
        raise
    _wrapped[id(optimizer)] = (optimizer, session)
    return optimizer


def flush(x: Any = None) -> None:
    """See :func:`bytesched.flush`."""
    for session in _sessions(x):
        session.flush()


def stats(x: Any = None) -> dict[str, int | float | str]:
    """See :func:`bytesched.stats`."""
    for session in _sessions(x):
        return session.stats()
    return {"mode": "plain"}


def unwrap(x: Any) -> Any:
    """See :func:`bytesched.unwrap`."""
    for session in _sessions(x):
        try:
            session.flush()
        finally:
            session.close()
            for key in [key for key, (_, s) in _wrapped.items() if s is session]:
                del _wrapped[key]
    return x


def _sessions(x: Any) -> list[Session]:
    """The sessions of an optimizer or a model, or all of them."""
    found: list[Session] = []
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


def _close(session: Session) -> None:
    try:
        # After an error, what was not updated shall not be read as if it had been.
        session.close(release_parameters=session.error is None)
    except Exception:
        log.exception("%r could not be closed", session)
