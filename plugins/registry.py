"""What is wrapped in this process: found, flushed, shown, unwrapped, and ended with the process."""

from __future__ import annotations

import json
import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from bytesched.errors import in_one_line
from bytesched.files import write_text

from .ending import at_exit, died_of, end_beside, make_exit_fail, wait_for_ends, wait_for_last

log = logging.getLogger("bytesched")


class Wrapped(Protocol):
    """The session of a wrapped optimizer, whatever carries its gradients."""

    @property
    def root(self) -> Any:
        """The model, which the user may name instead of the optimizer."""

    @property
    def error(self) -> BaseException | None:
        """The first error, which is final."""

    @property
    def unseen_error(self) -> BaseException | None:
        """That error, if it was raised nowhere yet."""

    def flush(self) -> None:
        """Completes everything that was started, and applies everything armed."""

    def restore(self) -> None:
        """What is spread over the ranks is whole here: they go on without each other."""

    def leave(self) -> None:
        """Other ranks hear that this one takes no more steps; it waits for none. Idempotent."""

    def disown(self) -> None:
        """In a forked child, which has no thread of it: nothing waits or sends there any more."""

    def fail(self, error: BaseException) -> None:
        """Ends everything under way, on every rank."""

    def close(self, *, release_parameters: bool = True) -> None:
        """Takes every hook off and stops every thread; does not flush. Idempotent."""

    def stats(self) -> dict[str, int | float | str]:
        """Figures, flat, with units in the names."""


class WrappedStore(ABC):
    """A store that schedules what another store sends."""

    @abstractmethod
    def flush(self) -> None:
        """Completes everything that was started."""

    @abstractmethod
    def stats(self) -> dict[str, int | float | str]:
        """Figures, flat, with units in the names."""

    @abstractmethod
    def unwrap(self) -> Any:
        """Flushes, ends, and returns the store beneath."""


@dataclass
class _Entry:
    """What is known of a session."""

    #: ends the session with its model
    end: weakref.finalize[..., Any] | None
    optimizers: list[weakref.ref[Any]] = field(default_factory=list)
    #: where its figures are written; empty: nowhere
    folder: str = ""


#: by session, in the order of wrapping
_entries: dict[Wrapped, _Entry] = {}

#: of sessions that have ended, the latest last
_ended: deque[dict[str, int | float | str]] = deque(maxlen=64)

_watches_forks = False

#: of the process that this one was forked from: none of it may be taken apart here
_disowned: list[dict[Wrapped, _Entry]] = []

#: called with an optimizer and a model whenever the user is about to wrap these
before_wrap: list[Callable[[Any, Any], None]] = []
#: called with every new session, before its first round
after_wrap: list[Callable[[Any], None]] = []


def add(optimizer: Any, session: Wrapped, *, figures: str = "") -> None:
    """From now on ``session`` stands behind ``optimizer``.

    Until `unwrap`, until nothing refers to its model any more, or until the process ends.

    Args:
        figures: the folder that its figures are written to when it ends, if there is one.
    """
    if is_new := session not in _entries:
        end = None
        if session.root is not None:
            end = weakref.finalize(session.root, _model_gone, session)
            end.atexit = False
        _entries[session] = _Entry(end)
    entry = _entries[session]
    entry.optimizers.append(weakref.ref(optimizer))
    entry.folder = figures or entry.folder
    # Anew each time: it goes before that of what carries the session.
    at_exit(_at_exit)
    _watch_forks()
    if is_new:
        for hook in after_wrap:
            hook(session)


def is_wrapped(optimizer: Any) -> bool:
    """Whether a session stands behind ``optimizer``."""
    return any(_has(entry, optimizer) for entry in list(_entries.values()))


def _has(entry: _Entry, optimizer: Any) -> bool:
    return any(known() is optimizer for known in entry.optimizers)


def why_wrapped(optimizer: Any, model: Any) -> str:
    """Why ``optimizer``, which is wrapped, is not wrapped with ``model``; what to do about it."""
    name = type(optimizer).__name__
    if any(session.root is model for session in sessions(optimizer)):
        return f"this {name} is already wrapped; unwrap it first"
    return (
        f"this {name} is already wrapped, with another model than this {type(model).__name__}, and "
        "can be wrapped with only one: give each model its own optimizer, of the same class and "
        "settings, and wrap both; or leave it, and the other model trains as without bytesched"
    )


def sessions(x: Any = None) -> list[Wrapped]:
    """The sessions of an optimizer or a model, or all of them, in the order of wrapping."""
    return [
        session
        for session, entry in list(_entries.items())
        if x is None or x is session.root or _has(entry, x)
    ]


def optimizers_of(session: Wrapped) -> list[Any]:
    """Those that ``session`` stands behind and that are still there."""
    known = _entries[session].optimizers if session in _entries else ()
    return [optimizer for one in known if (optimizer := one()) is not None]


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
    if found:
        return (alive or found)[-1].stats()
    return ended()[-1] if x is None and _ended else {"mode": "plain"}


def ended() -> list[dict[str, int | float | str]]:
    """The figures of the last sessions that have ended, the latest last."""
    return list(_ended)


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
            session.restore()
        finally:
            entry = _forget(session)
            _keep_figures(session, "" if entry is None else entry.folder)
            session.close()
    return x


def _forget(session: Wrapped) -> _Entry | None:
    """Takes the entry of ``session`` out, and returns it, if it was there still."""
    entry = _entries.pop(session, None)
    if entry is not None and entry.end is not None:
        entry.end.detach()
    return entry


def _model_gone(session: Wrapped) -> None:
    """Nothing refers to the model of ``session`` any more. Any thread, between any two lines."""
    if (entry := _forget(session)) is not None:
        end_beside(partial(_end, session, entry.folder))


def _end(session: Wrapped, folder: str) -> None:
    try:
        if session.error is None:
            session.flush()
    except Exception:
        log.exception("the last step of a model that is gone could not be applied")
        make_exit_fail()
    _close(session, folder)


def _store_of(x: Any) -> WrappedStore | None:
    """The wrapped store that ``x`` is, or that a Gluon trainer trains through, or None."""
    settings = getattr(x, "_kvstore_params", None)
    store = settings["kvstore"] if isinstance(settings, dict) else x
    return store if isinstance(store, WrappedStore) else None


def _at_exit() -> None:
    """Applies the last step; after an uncaught exception only stops."""
    died = died_of()
    # All of them before any end, which may wait for ranks that wait for this one in another.
    for session in sessions():
        try:
            if died is None and session.error is None:
                session.flush()
                session.leave()
            elif died is not None:
                session.fail(died)
            elif session.unseen_error is not None:
                raise session.unseen_error
        except Exception:
            log.exception("the last step could not be applied")
            make_exit_fail()
    wait_for_ends()
    for session in sessions():
        # Before that: what it lets go of may be all that has kept the model, and ended it again.
        if (entry := _forget(session)) is not None:
            _close(session, entry.folder)
    wait_for_last()


def _watch_forks() -> None:
    global _watches_forks
    if not _watches_forks:
        _watches_forks = True
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def _before_fork() -> None:
    """A child has this process's memory and none of its threads: all values are to be there."""
    wait_for_ends()
    for session in sessions():
        if session.error is None:
            try:
                session.flush()
            except Exception:
                log.exception("a process is forked while updates are outstanding")


def _after_fork() -> None:
    for session in sessions():
        session.disown()
    _disowned.append(_entries.copy())
    _entries.clear()


def _keep_figures(session: Wrapped, folder: str) -> None:
    try:
        figures = session.stats()
    except Exception:
        log.exception("%r has no figures", session)
        return
    if session.error is not None:
        figures = {**figures, "error": in_one_line(session.error)}
    _ended.append(figures)
    if folder:
        path = Path(folder, f"rank{figures.get('rank', 0)}.figures.json")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Those of all sessions that have ended, in one piece.
            write_text(path, json.dumps(ended(), indent=1) + "\n")
        except OSError as error:
            log.warning("figures could not be written to %s: %s", path, error)


def _close(session: Wrapped, folder: str) -> None:
    _keep_figures(session, folder)
    try:
        # After an error, what was not updated shall not be read as if it had been.
        session.close(release_parameters=session.error is None)
    except Exception:
        log.exception("%r could not be closed", session)
