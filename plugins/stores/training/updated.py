"""A session whose optimizer is in the store: gradients go there, and parameters come back.

The store updates a key when all workers have pushed it and worker 0 has called ``step()``, under
the hyper-parameters that hold then. The optimizer's state is in the store alone.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.observe import Observers

from ...dependency.context import Context
from ...engine.hooked import HookedModel
from ...engine.phase import Life
from ...layout.plan import Plan
from ...layout.slots import Slot
from ...proxies.first_use import FirstUse
from ...proxies.hooks import StayingForwardHook, StayingHook
from ...routes.backend import from_leader
from ...routes.carrier import Traffic
from .store_backend import StoreBackend
from .store_carrier import StoreCarrier
from .store_running import StoreRunning

__all__ = ["StoreSession"]


class StoreSession(HookedModel):
    """The life of one model whose parameters the store updates.

    Args:
        root: the module whose call is a forward pass.
        slots: its parameters, in registration order, the same on all workers.
        optimizer: the user's, of which only class, hyper-parameters and ``step()`` are used.
        config: with the sizes of chunks and window.
        backend: the workers of the store.
    """

    mode = "store"

    def __init__(
        self,
        root: nn.Module,
        slots: Sequence[Slot],
        optimizer: torch.optim.Optimizer,
        config: Config,
        *,
        backend: StoreBackend,
        observers: Observers,
    ) -> None:
        super().__init__(root, slots, backend, observers)
        context = Context(backend, self._progress, self._streams, self._meter, observers)
        self._now: _StoreLife = _FirstForward(
            slots, optimizer, self._first_use, config, backend, context
        )
        before = StayingHook(self._before_forward)
        self._undo.append(root.register_forward_pre_hook(before, prepend=True).remove)
        after = StayingForwardHook(self._after_forward)
        self._undo.append(root.register_forward_hook(after, always_call=True).remove)
        for handle in (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_state_dict_post_hook(self._add_state),
            # The user may name the optimizer instead of the model, which is there as long as it is.
            optimizer.register_load_state_dict_post_hook(partial(self._send_state, root)),
        ):
            self._undo.append(handle.remove)

    @property
    def _life(self) -> Life:
        return self._now

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._is_disowned:
            return
        if not torch.is_grad_enabled():
            if not module.training:
                self._now.synchronize_all()
            return
        self._progress.check()
        self._meter.forward_begins()
        self._now.forward_begins()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._now = self._now.forward_ends()
            self._meter.forward_ends()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        self._progress.check()
        self._meter.step_begins()
        if kwargs.get("closure") or len(args) > 1:
            raise PluginError("step(closure) needs gradients here, and the optimizer is elsewhere")
        self._now.step()
        copied = copy.copy(optimizer)
        copied.param_groups = []
        return (copied, *args[1:]), kwargs

    def _add_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        self.flush()
        return self._now.with_state(state)

    def _send_state(self, root: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._now.state_loaded()


class _StoreLife(Life, Protocol):
    """A life of a session whose updates are made in the store."""

    def forward_begins(self) -> None:
        """The model is called."""

    def forward_ends(self) -> _StoreLife:
        """Its forward pass is over; returns the life that follows."""

    def step(self) -> None:
        """``step()`` of the optimizer is called."""

    def with_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict of the optimizer, with what the store has of it."""

    def state_loaded(self) -> None:
        """The optimizer has loaded a state."""


class _FirstForward:
    """Learns the order of first use, in which the plan is laid out."""

    plan = None
    traffic = Traffic()
    order = StoreCarrier.order

    def __init__(
        self,
        slots: Sequence[Slot],
        optimizer: torch.optim.Optimizer,
        first_use: FirstUse,
        config: Config,
        backend: StoreBackend,
        context: Context,
    ) -> None:
        self._slots = slots
        # The session, which is there until its model is gone, holds this.
        self._optimizer = weakref.ref(optimizer)
        self._first_use = first_use
        self._config = config
        self._backend = backend
        self._context = context

    def forward_begins(self) -> None:
        self._first_use.begin()

    def forward_ends(self) -> StoreRunning:
        """The order is known; collective."""
        self._first_use.end()
        self._first_use.close()
        cpu = torch.device("cpu")
        order = from_leader(self._backend, self._first_use.order(), cpu, "order")
        slots = [self._slots[index] for index in order]
        return StoreRunning(
            self._optimizer,
            Plan(slots, partition_bytes=self._config.partition_bytes),
            self._first_use,
            self._config,
            self._backend,
            self._context,
        )

    def step(self) -> None:
        pass

    def with_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def state_loaded(self) -> None:
        """It goes to the store with the first parameters."""

    def synchronize_all(self) -> None:
        pass

    def state(self) -> str:
        return "warming up"

    def disown(self) -> None:
        pass

    def close(self, *, release_parameters: bool) -> None:
        pass
