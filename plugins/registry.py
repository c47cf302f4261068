"""What is wrapped in this process: found, flushed, shown, unwrapped, and ended with the process."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

__all__ = [
    "Wrapped",
    "WrappedStore",
    "add",
    "announce",
    "before_wrap",
    "flush",
    "is_wrapped",
    "kind_of_store",
    "session_of",
    "sessions",
    "stats",
    "unwrap",
]

log = logging.getLogger("bytesched")


class Wrapped(Protocol):
    """The session of a wrapped optimizer, whatever carries its gradients."""

    @property
    def root(self) -> Any:
        """The model, which the user may name instead of the optimizer."""

    @property
    def error(self) -> BaseException | None:
        """The first error, which is final."""

    def flush(self) -> None:
        """Completes everything that was started, and applies everything armed."""

    def fail(self, error: BaseException) -> None:
        """Ends everything under way, on every rank."""

    def close(self, *, release_parameters: bool = True) -> None:
        """Takes every hook off and stops every thread; does not flush. Idempotent."""

    def stats(self) -> dict[str, int | float | str]:
        """Figures, flat, with units in the names."""


class WrappedStore(Protocol):
    """A store that schedules what another store sends."""

    def flush(self) -> None:
        """Completes everything that was started."""

    def stats(self) -> dict[str, int | float | str]:
        """Figures, flat, with units in the names."""

    def unwrap(self) -> Any:
        """Flushes, ends, and returns the store beneath."""


@dataclass(frozen=True)
class _Entry:
    #: kept alive, so that its id stays its own
    optimizer: Any
    session: Wrapped
    #: the process that has the threads of the session; a forked child has not
    pid: int


#: in the order of wrapping, by the id of the optimizer
_entries: dict[int, _Entry] = {}

_store_kinds: list[type[Any]] = []

_before_wrap: list[Callable[[Any, Any], None]] = []

StoreT = TypeVar("StoreT", bound=type[Any])


def kind_of_store(kind: StoreT) -> StoreT:
    """Decorates a class of which every object is a `WrappedStore`."""
    _store_kinds.append(kind)
    return kind


def before_wrap(hook: Callable[[Any, Any], None]) -> None:
    """Calls ``hook(optimizer, model)`` from now on whenever the user is about to wrap these."""
    _before_wrap.append(hook)


def announce(optimizer: Any, model: Any) -> None:
    """Calls the hooks of `before_wrap`."""
    for hook in _before_wrap:
        hook(optimizer, model)


def add(optimizer: Any, session: Wrapped) -> None:
    """From now on ``session`` stands behind ``optimizer``, until `unwrap` or the process's end."""
    _entries[id(optimizer)] = _Entry(optimizer, session, os.getpid())
    # Handlers run last in, first out: ours goes before that of what carries the session.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def is_wrapped(optimizer: Any) -> bool:
    """Whether a session stands behind ``optimizer``."""
    return id(optimizer) in _entries


def sessions(x: Any = None) -> list[Wrapped]:
    """The sessions of an optimizer or a model, or all of them, in the order of wrapping."""
    found: list[Wrapped] = []
    for entry in _entries.values():
        session = entry.session
        if (x is None or x is entry.optimizer or x is session.root) and session not in found:
            found.append(session)
    return found


def session_of(x: Any) -> Wrapped | None:
    """The session of an optimizer or a model, if `wrap` was called on it."""
    return next(iter(sessions(x)), None)


def flush(x: Any = None) -> None:
    """See :func:`bytesched.flush`."""
    if (store := _store_of(x)) is not None:
        store.flush()
    for session in sessions(x):
        session.flush()


def stats(x: Any = None) -> dict[str, int | float | str]:
    """See :func:`bytesched.stats`."""
    if (store := _store_of(x)) is not None:
        return store.stats()
    found = sessions(x)
    alive = [session for session in found if session.error is None]
    return (alive or found)[-1].stats() if found else {"mode": "plain"}


def unwrap(x: Any) -> Any:
    """See :func:`bytesched.unwrap`."""
    if (store := _store_of(x)) is not None:
        plain = store.unwrap()
        if store is x:
            return plain
        x._kvstore_params["kvstore"] = plain
        return x
    for session in sessions(x):
        try:
            session.flush()
        finally:
            session.close()
            for key in [key for key, entry in _entries.items() if entry.session is session]:
                del _entries[key]
    return x


def _store_of(x: Any) -> WrappedStore | None:
    """The wrapped store that ``x`` is, or that a Gluon trainer trains through, or None."""
    settings = getattr(x, "_kvstore_params", None)
    store = settings["kvstore"] if isinstance(settings, dict) else x
    is_wrapped_store = isinstance(store, tuple(_store_kinds))
    found: WrappedStore | None = store if is_wrapped_store else None
    return found


def _at_exit() -> None:
    """Applies the last step; after an uncaught exception only stops."""
    died = getattr(sys, "last_value", None)
    here = [entry.session for entry in _entries.values() if entry.pid == os.getpid()]
    for session in sessions():
        if session not in here:
            continue
        try:
            if died is None and session.error is None:
                session.flush()
            elif died is not None:
                session.fail(died)
        except Exception:
            log.exception("the last step could not be applied")
        _close(session)
    _entries.clear()


def _close(session: Wrapped) -> None:
    try:
        # After an error, what was not updated shall not be read as if it had been.
        session.close(release_parameters=session.error is None)
    except Exception:
        log.exception("%r could not be closed", session)
