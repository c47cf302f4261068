"""Elastic Horovod: sessions come and go with the ranks.

Ranks leave and join between two calls of the function that ``hvd.elastic.run`` runs, and only in
there may they do anything together. So a session begins at the first forward pass after every
reset; until then, and whenever a rank is alone, the optimizer is plain Horovod's.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from horovod.common.elastic import notification_manager
from torch import nn

from bytesched.errors import in_one_line

from ..planned.hooked_session import HookedSession

log = logging.getLogger("bytesched")


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
