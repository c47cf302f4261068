"""Sessions over a store: one whose gradients it sums, and one whose parameters it updates.

A store that updates does so with a key when all workers have pushed it and worker 0 has called
``step()``, under the hyper-parameters that hold then. The optimizer's state is in the store alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from bytesched.errors import PluginError, UnusedParameterError

from ...planned.buckets import Bucket
from ...planned.hook_source import HookSource
from ...planned.hooked_session import HookedSession
from ...planned.terms import Terms
from ...proxies.pending_grads import PendingGrad
from .owner import Owner, gathered_state, open_updates, scatter_state
from .wire import StoreWire


class _SummedSource(HookSource):
    """Gradients whose chunks have keys before they are sent."""

    _wire: StoreWire

    def _settle(self, order: Sequence[int]) -> None:
        super()._settle(order)
        # Workers meet for each new key: here, where they wait for each other anyway.
        for bucket in self.buckets:
            for chunk in bucket.chunks:
                self._wire.name(chunk.sent, chunk.key)


class StoreSession(HookedSession):
    """The life of one model whose gradients go to a store; see `HookedSession`."""

    source_kind: ClassVar[type[HookSource]] = _SummedSource
    _wire: StoreWire

    def stats(self) -> dict[str, int | float | str]:
        return {**super().stats(), **self._wire.figures()}


class _InStore:
    """What such a gradient waits for, in vain (see `pending_grads.Sum`)."""

    #: what is on its way to here
    chunks: ClassVar[tuple[()]] = ()

    def __init__(self, name: str) -> None:
        self._name = name

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return NotImplemented

    def settle(self) -> None:
        raise PluginError(
            f"the gradient of {self._name!r} is in the store, which updates: it cannot be read, "
            "clipped or changed here; let the workers update (a store without an optimizer)"
        )

    def zeroes(self) -> bool:
        return False


class _UpdatedSource(HookSource):
    """Gradients that nobody reads here once they have been handed out.

    The first forward pass shows the order of buckets: those of a first round could not be others
    later, as the store has updated them.
    """

    early_rounds: ClassVar[int] = 0

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # The store has no keys.
        self.is_synced = False

    def lay_out(self, order: Sequence[int]) -> None:
        """Buckets of parameters in ``order`` of their gradients; no round is open."""
        self._lay_out(order)
        self._listener.layout_changes()
        self.is_synced = True

    def _hand_out(self, bucket: Bucket, left: Container[int] = ()) -> bool:
        for member in bucket.members:
            pending: Any = member.parameter.grad
            if type(member.parameter.grad) is torch.Tensor:
                pending.__class__ = PendingGrad
                pending.sum_ = _InStore(member.name)
        return True


class UpdatedSession(StoreSession):
    """The life of one model whose parameters the store updates.

    Of the user's optimizer only class, hyper-parameters and ``step()`` are used.
    """

    source_kind: ClassVar[type[_UpdatedSource]] = _UpdatedSource
    source: _UpdatedSource
    owners: Owner

    def __init__(
        self,
        root: nn.Module,
        terms: Terms,
        optimizer: torch.optim.Optimizer,
        wire: StoreWire,
    ) -> None:
        # It keeps the model, and so this session, alive.
        self._optimizer = weakref.ref(optimizer)
        super().__init__(
            root,
            replace(terms, divisor=1, open_updates=partial(open_updates, wire)),
            sync=lambda: self._is_open,
            find_unused=False,
        )
        for handle in (
            optimizer.register_state_dict_post_hook(self._add_state),
            optimizer.register_load_state_dict_post_hook(self._send_state),
        ):
            self._undo.append(handle.remove)

    @property
    def _is_open(self) -> bool:
        """Whether the store has the parameters."""
        return bool(self.owners.pieces)

    @property
    def mode(self) -> str:
        return "plain" if self._is_off else "store"

    # -- forward and backward ----------------------------------------------------------

    def forward_ends(self) -> None:
        """See `PlannedSession`; the first one shows the order of chunks, collective then."""
        super().forward_ends()
        if self._is_open or self._is_off:
            return
        self._gates.are_learned()
        place = {id(slot): index for index, slot in enumerate(self.slots)}
        used = [place[id(slot)] for bundle in self._updates.bundles for slot in bundle.slots]
        self.source.lay_out(list(reversed(self._wire.leaders(used, "order"))))
        self.owners.open(self.source.buckets)
        self._move_state()

    def begin(self) -> None:
        super().begin()
        if names := self.source.absent:
            error = UnusedParameterError(
                f"{len(names)} parameters got no gradient on worker {self._wire.rank}: "
                f"{', '.join(names[:5])}; a store that updates needs one for each"
            )
            self._failures.fail(error, is_raised=True)
            raise error

    def _finish(self) -> None:
        # Another forward pass may bring what is missing.
        self.source.finish()

    # -- state -------------------------------------------------------------------------

    def _move_state(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.state:
            scatter_state(self.owners.store, self.owners.pieces, optimizer.state)
            optimizer.state.clear()

    def _add_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict of the optimizer, with the store's state where a checkpoint has it."""
        self.flush()
        if not self._is_open:
            return state
        entries = gathered_state(self.owners.store, self.owners.pieces)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbered = {n: entries[p] for n, p in enumerate(parameters) if entries.get(p)}
        return {**state, "state": numbered}

    def _send_state(self, optimizer: torch.optim.Optimizer) -> None:
        """What was loaded goes to the store; every worker loads."""
        if self._is_open:
            self.flush()
            self._move_state()

    # -- life --------------------------------------------------------------------------

    def close(self, *, release_parameters: bool = True) -> None:
        super().close(release_parameters=release_parameters)
        for parameter in self._parameters:
            grad: Any = parameter.grad
            if type(grad) is PendingGrad and type(grad.sum_) is _InStore:
                parameter.grad = None
