"""A session whose optimizer is in the store: gradients go there, and parameters come back.

The store updates a key when all workers have pushed it and worker 0 has called ``step()``, under
the hyper-parameters that hold then. The optimizer's state is in the store alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from bytesched.config import Config
from bytesched.errors import UnusedParameterError
from bytesched.observe import Observers
from bytesched.tunable import Setting

from ...planned.bundles import Slot
from .absent import UpdatedSource, forget_absent
from .owner import Owner, owning
from .state import gathered_state
from .summed import StoreSession
from .wire import StoreWire
from .workers import Workers

__all__ = ["UpdatedSession"]


class UpdatedSession(StoreSession):
    """The life of one model whose parameters the store updates.

    Args:
        slots: its parameters, in registration order, the same on all workers.
        optimizer: the user's, of which only class, hyper-parameters and ``step()`` are used.
        setting: the sizes in use, for figures.
        workers: those of ``wire``.
    """

    source_kind: ClassVar[type[UpdatedSource]] = UpdatedSource
    source: UpdatedSource
    owners: Owner

    def __init__(
        self,
        root: nn.Module,
        slots: Sequence[Slot],
        optimizer: torch.optim.Optimizer,
        config: Config,
        wire: StoreWire,
        observers: Observers,
        *,
        setting: Setting,
        workers: Workers,
    ) -> None:
        self._workers = workers
        # It keeps the model, and so this session, alive.
        self._optimizer = weakref.ref(optimizer)
        super().__init__(
            root,
            slots,
            config,
            wire,
            observers,
            setting=setting,
            divisor=1,
            sync=lambda: self._is_open,
            find_unused=False,
            open_updates=owning(workers.store, wire),
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
        """See `PlannedSession`."""
        return "plain" if self._is_off else "store"

    # -- forward and backward ----------------------------------------------------------

    def forward_ends(self) -> None:
        """See `Forward`; the first one shows the order of chunks, collective then."""
        super().forward_ends()
        if self._is_open or self._is_off:
            return
        self._gates.are_learned()
        place = {id(slot): index for index, slot in enumerate(self._slots)}
        used = [place[id(slot)] for bundle in self._updates.bundles for slot in bundle.slots]
        self.source.lay_out(list(reversed(self._workers.leaders(used, "order"))))
        self.owners.open(self.source.buckets)
        self._move_state()

    def begin(self) -> None:
        """See `Steps`."""
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
            self.owners.move_state(optimizer)

    def _add_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict of the optimizer, with the store's state where a checkpoint has it."""
        self.flush()
        if not self._is_open:
            return state
        entries = gathered_state(self._workers.store, self.owners.pieces)
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
        """See `PlannedSession`."""
        super().close(release_parameters=release_parameters)
        forget_absent(self._parameters)
