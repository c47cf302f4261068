"""What is wrapped in this process: found, flushed, shown, unwrapped, and ended with the process."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

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


class WrappedStore(Protocol):
    """A store that schedules what another store sends."""

    def flush(self) -> None:
        """Completes everything that was started."""

    def stats(self) -> dict[str, int | float | str]:
        """Figures, flat, with units in the names."""

    def unwrap(self) -> Any:
        """Flushes, ends, and returns the store beneath."""


@dataclass(frozen=True, eq=False)
class _Entry:
    optimizer: weakref.ref[Any]
    session: Wrapped
    #: ends the session with its model
    end: weakref.finalize[..., Any] | None


#: in the order of wrapping
_entries: dict[_Entry, None] = {}

#: of sessions that have ended, the latest last
_ended: deque[dict[str, int | float | str]] = deque(maxlen=64)

#: where sessions write their figures
_folders: weakref.WeakKeyDictionary[Wrapped, str] = weakref.WeakKeyDictionary()

_store_kinds: list[type[Any]] = []

_watches_forks = False

#: of the process that this one was forked from: none of it may be taken apart here
_disowned: list[_Entry] = []

_before_wrap: list[Callable[[Any, Any], None]] = []
_after_wrap: list[Callable[[Any], None]] = []

StoreT = TypeVar("StoreT", bound=type[Any])


def kind_of_store(kind: StoreT) -> StoreT:
    """Decorates a class of which every object is a `WrappedStore`."""
    _store_kinds.append(kind)
    return kind


def before_wrap(hook: Callable[[Any, Any], None]) -> None:
    """Calls ``hook(optimizer, model)`` from now on whenever the user is about to wrap these."""
    _before_wrap.append(hook)


def after_wrap(hook: Callable[[Any], None]) -> None:
    """Calls ``hook(session)`` from now on for every new session, before its first round."""
    _after_wrap.append(hook)


def announce(optimizer: Any, model: Any) -> None:
    """Calls the hooks of `before_wrap`."""
    for hook in _before_wrap:
        hook(optimizer, model)


def add(optimizer: Any, session: Wrapped, *, figures: str = "") -> None:
    """From now on ``session`` stands behind ``optimizer``.

    Until `unwrap`, until nothing refers to its model any more, or until the process ends.

    Args:
        figures: the folder that its figures are written to when it ends, if there is one.
    """
    is_new = all(entry.session is not session for entry in list(_entries))
    if figures:
        _folders[session] = figures
    end = next((entry.end for entry in list(_entries) if entry.session is session), None)
    if end is None and session.root is not None:
        end = weakref.finalize(session.root, _model_gone, session)
        end.atexit = False
    _entries[_Entry(weakref.ref(optimizer), session, end)] = None
    # Anew each time: it goes before that of what carries the session.
    at_exit(_at_exit)
    _watch_forks()
    if is_new:
        for hook in _after_wrap:
            hook(session)


def is_wrapped(optimizer: Any) -> bool:
    """Whether a session stands behind ``optimizer``."""
    return any(entry.optimizer() is optimizer for entry in list(_entries))


def sessions(x: Any = None) -> list[Wrapped]:
    """The sessions of an optimizer or a model, or all of them, in the order of wrapping."""
    found: list[Wrapped] = []
    for entry in list(_entries):
        session = entry.session
        if (x is None or x is entry.optimizer() or x is session.root) and session not in found:
            found.append(session)
    return found


def optimizers_of(session: Wrapped) -> list[Any]:
    """Those that ``session`` stands behind and that are still there."""
    found = [entry.optimizer() for entry in list(_entries) if entry.session is session]
    return [optimizer for optimizer in found if optimizer is not None]


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
            _keep_figures(session)
            session.close()
            _forget(session)
    return x


def _forget(session: Wrapped) -> list[_Entry]:
    """Takes the entries of ``session`` out, and returns them."""
    gone = [entry for entry in list(_entries) if entry.session is session]
    for entry in gone:
        _entries.pop(entry, None)
        if entry.end is not None:
            entry.end.detach()
    return gone


def _model_gone(session: Wrapped) -> None:
    """Nothing refers to the model of ``session`` any more. Any thread, between any two lines."""
    if _forget(session):
        end_beside(partial(_end, session))


def _end(session: Wrapped) -> None:
    try:
        if session.error is None:
            session.flush()
    except Exception:
        log.exception("the last step of a model that is gone could not be applied")
        make_exit_fail()
    _close(session)


def _store_of(x: Any) -> WrappedStore | None:
    """The wrapped store that ``x`` is, or that a Gluon trainer trains through, or None."""
    settings = getattr(x, "_kvstore_params", None)
    store = settings["kvstore"] if isinstance(settings, dict) else x
    is_wrapped_store = isinstance(store, tuple(_store_kinds))
    found: WrappedStore | None = store if is_wrapped_store else None
    return found


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
        _forget(session)
        _close(session)
    _entries.clear()
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
    _disowned.extend(_entries)
    _entries.clear()


def _keep_figures(session: Wrapped) -> None:
    try:
        figures = session.stats()
    except Exception:
        log.exception("%r has no figures", session)
        return
    if session.error is not None:
        figures = {**figures, "error": in_one_line(session.error)}
    _ended.append(figures)
    if (folder := _folders.get(session)) is not None:
        _write_figures(Path(folder), figures.get("rank", 0))


def _write_figures(folder: Path, rank: object) -> None:
    """Writes those of all sessions that have ended, in one piece."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"rank{rank}.figures.json", json.dumps(ended(), indent=1) + "\n")
    except OSError as error:
        log.warning("the figures of rank %s could not be written to %s: %s", rank, folder, error)


def _close(session: Wrapped) -> None:
    _keep_figures(session)
    try:
        # After an error, what was not updated shall not be read as if it had been.
        session.close(release_parameters=session.error is None)
    except Exception:
        log.exception("%r could not be closed", session)
