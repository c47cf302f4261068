"""What Horovod does around a session: it is shut down, ranks join, and in elastic runs they change.

``hvd.shutdown()`` and ``hvd.join()`` come after what is outstanding. Elastic ranks leave and join
between two calls of the function that ``hvd.elastic.run`` runs, and only in there may they do
anything together. So a session begins at the first forward pass after every reset; until then, and
whenever a rank is alone, the optimizer is plain Horovod's.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from horovod.common.elastic import notification_manager
from horovod.torch import mpi_ops
from torch import nn

from bytesched.environment import is_horovod_elastic
from bytesched.errors import PluginError, in_one_line

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

    def add(self, session: HookedSession, timeout_s: float, *, tunes: bool) -> Callable[[], None]:
        """Horovod is not shut down or joined before ``session`` is flushed; returns the way back.

        Not joined at all if it ``tunes``. After an error of ``session`` the shutdown ends within
        ``timeout_s``, or the process does.
        """
        self._tunes[session] = tunes
        self._ending_s = min(timeout_s, _ENDING_S)
        for call, original in _originals.items():
            ending = self._join if call == _JOIN else self._shut_down
            setattr(*call, partial(ending, original))
        return partial(self._remove, session)

    def _remove(self, session: HookedSession) -> None:
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


watch_endings: Final = _Watch().add


class Elastic:
    """An optimizer and its model, wrapped while there may be no session.

    Args:
        begin: a session for both, or None if these ranks have no use for one; collective.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        root: nn.Module,
        begin: Callable[[torch.optim.Optimizer, nn.Module], HookedSession | None],
    ) -> None:
        # It is there until its model is gone, and keeps neither.
        self._root = weakref.ref(root)
        self._optimizer = weakref.ref(optimizer)
        self._begin = begin
        self._session: HookedSession | None = None
        #: these ranks have begun, with a session or without
        self._begun = False
        #: states whose resets and commits we hear of; they hold models
        self._states: list[weakref.ref[Any]] = []
        self._undo: list[Callable[[], None]] = [
            root.register_forward_pre_hook(self._before_forward, prepend=True).remove,
            root._register_load_state_dict_pre_hook(self._before_load).remove,
            # The user may name the optimizer instead of the model, which is there as long as it is.
            optimizer.register_load_state_dict_pre_hook(partial(self._before_load, root)).remove,
        ]

    @property
    def root(self) -> nn.Module | None:
        """The model; None when nothing else refers to it any more."""
        return self._root()

    @property
    def error(self) -> BaseException | None:
        """The first error of the current session."""
        return None if self._session is None else self._session.error

    @property
    def unseen_error(self) -> BaseException | None:
        """That error, if it was raised nowhere yet."""
        return None if self._session is None else self._session.unseen_error

    def restore(self) -> None:
        """Nothing is spread over the ranks."""

    def leave(self) -> None:
        """No other rank waits for steps of this one alone."""

    def disown(self) -> None:
        """In a forked child: parameters and gradients are ordinary ones."""
        self._begun = True
        if self._session is not None:
            self._session.disown()

    def flush(self) -> None:
        """Everything that was started is reduced, and everything armed is applied."""
        if self._session is not None:
            self._session.flush()

    def fail(self, error: BaseException) -> None:
        """Ends everything under way, on every rank."""
        if self._session is not None:
            self._session.fail(error)

    def close(self, *, release_parameters: bool = True) -> None:
        """Takes every hook off, for good."""
        for undo in self._undo:
            undo()
        for state in self._heard():
            state._reset_callbacks.remove(self._reset)
            del state.check_host_updates
        self._undo.clear()
        self._states.clear()
        self._end(release_parameters=release_parameters)

    def stats(self) -> dict[str, int | float | str]:
        """Figures of the current session."""
        return {"mode": "plain"} if self._session is None else self._session.stats()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._begun or not (module.training and torch.is_grad_enabled()):
            return
        self._begun = True
        for state in notification_manager._listeners:
            self._listen(state)
        optimizer = self._optimizer()
        self._session = None if optimizer is None else self._begin(optimizer, module)
        if self._session is not None:
            # Its own hook is too late for the call that is under way.
            self._session.before_forward(module, args)

    def _listen(self, state: Any) -> None:
        if any(state is heard for heard in self._heard()):
            return
        self._states.append(weakref.ref(state))
        state.register_reset_callbacks([self._reset])
        check = state.check_host_updates

        def apply_and_check() -> None:
            # It may raise the interrupt that shuts Horovod down, and the last step with it.
            self.flush()
            check()

        state.check_host_updates = apply_and_check

    def _heard(self) -> list[Any]:
        return [state for alive in self._states if (state := alive()) is not None]

    def _before_load(self, *_: Any) -> None:
        """A restored state replaces what a failed session could not finish."""
        try:
            self.flush()
        except Exception as error:  # noqa: BLE001 - whatever failed, it is replaced
            log.info("state restored: outstanding updates are dropped (%s)", in_one_line(error))
            self._end(release_parameters=True)

    def _reset(self) -> None:
        """Horovod was initialized again, with other ranks or the same."""
        self._end(release_parameters=True)
        self._begun = False

    def _end(self, *, release_parameters: bool) -> None:
        if self._session is not None:
            self._session.close(release_parameters=release_parameters)
            self._session = None
