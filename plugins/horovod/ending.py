"""``hvd.shutdown()`` and ``hvd.join()``: what is outstanding comes first."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from horovod.torch import mpi_ops

from bytesched.environment import is_horovod_elastic
from bytesched.errors import PluginError

from ..planned.hooked_session import HookedSession

log = logging.getLogger("bytesched")

#: what Horovod gets, at most, to end after a failure
_ENDING_S: Final = 60.0

#: ``hvd.shutdown()`` calls the first two; the handler that Horovod leaves for the exit calls the
#: second alone. Scripts may have imported these functions by name long ago.
_SHUTDOWN: Final[tuple[tuple[Any, str], ...]] = (
    (mpi_ops.mpi_lib, "horovod_torch_reset"),
    (mpi_ops._basics.MPI_LIB_CTYPES, "horovod_shutdown"),
)
#: For a rank that has joined, Horovod sums zeros, also where it was about to announce a chunk.
_JOIN: Final = (mpi_ops.mpi_lib, "horovod_torch_join")
_originals: Final[dict[tuple[Any, str], Callable[..., Any]]] = {
    call: getattr(*call) for call in (*_SHUTDOWN, _JOIN)
}


class _Watch:
    """Stands in front of Horovod's shutdown while a session is open, and after one has failed."""

    def __init__(self) -> None:
        #: of each, whether its ranks agree on sizes from time to time
        self._tunes: dict[HookedSession, bool] = {}
        self._failed = False
        self._ending_s = _ENDING_S

    def add(self, session: HookedSession, timeout_s: float, *, tunes: bool) -> None:
        self._tunes[session] = tunes
        self._ending_s = min(timeout_s, _ENDING_S)
        for call, original in _originals.items():
            ending = self._join if call == _JOIN else self._shut_down
            setattr(*call, partial(ending, original))

    def remove(self, session: HookedSession) -> None:
        del self._tunes[session]
        self._failed = self._failed or session.error is not None
        if not self._tunes and not self._failed:
            for call, original in _originals.items():
                setattr(*call, original)

    def _join(self, original: Callable[..., Any], *args: Any) -> Any:
        for session in [session for session, tunes in self._tunes.items() if tunes]:
            # Decisions come after so many steps, and a rank that has joined counts none.
            error = PluginError(
                "hvd.join() with tune on: the ranks would no longer agree on when sizes change. "
                "Turn tune off, or give every rank as many batches"
            )
            session.fail(error)
            raise error
        for session in list(self._tunes):
            # What failed, and was said to have, does not keep the others waiting for this rank.
            if session.error is None or session.unseen_error is not None:
                session.flush()
                # Nor does this rank count the rounds that others make meanwhile.
                session.begin_anew()
        return original(*args)

    def _shut_down(self, original: Callable[[], Any]) -> Any:
        for session in list(self._tunes):
            try:
                if session.error is None:
                    session.flush()
            except Exception:
                # Reading a parameter that lacks its update raises it again.
                log.exception("the last step could not be applied before hvd.shutdown()")
        failed = self._failed or any(session.error is not None for session in self._tunes)
        # Elastic Horovod goes on after a failure, and has limits of its own.
        limited = failed and not is_horovod_elastic()
        with _limited(self._ending_s) if limited else contextlib.nullcontext():
            return original()


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """The process ends, with its stacks on stderr, if what is inside takes longer.

    Horovod waits, in C++, for ranks that may never answer: no exception ends that, and at the
    end of the interpreter no thread could be started to do so.
    """
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        sys.stdout.flush()
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


_watch: Final = _Watch()


def watch_endings(session: HookedSession, timeout_s: float, *, tunes: bool) -> Callable[[], None]:
    """Horovod is not shut down or joined before ``session`` is flushed; returns the way back.

    Not joined at all if it ``tunes``. After an error of ``session`` the shutdown ends within
    ``timeout_s``, or the process does.
    """
    _watch.add(session, timeout_s, tunes=tunes)
    return partial(_watch.remove, session)
