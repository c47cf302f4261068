"""A model whose gradients are taken by hooks of ours, as nobody else reduces them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.errors import PluginError, UnusedParameterError
from bytesched.tunable import Setting

from ..proxies.passes import IN_A_CONTEXT, are_in_a_context, refuse_stage
from .hook_source import HookSource
from .session import PlannedSession
from .source import Phase
from .terms import Terms
from .wire import Partition

__all__ = ["HookedSession"]


class HookedSession(PlannedSession):
    """The life of one wrapped model.

    Args:
        root: the module whose call is a forward pass; not kept alive.
        terms: with the parameters that are reduced as ``slots``.
        sync: whether the backward pass of the forward pass that begins now is to be reduced;
            None if ``backward_gradient``, or ``gradient``, is called for every gradient that is.
        find_unused: parameters may get no gradient; None: the first round shows it.
        is_static: one may get several in a round, as many in each.
        partitions: of parameters that some ranks reduce among themselves, by id.
    """

    source: HookSource
    #: what the buckets are of
    source_kind: ClassVar[type[HookSource]] = HookSource

    def __init__(
        self,
        root: nn.Module,
        terms: Terms,
        *,
        sync: Callable[[], bool] | None,
        find_unused: bool | None,
        is_static: bool = False,
        partitions: Mapping[int, Partition] = MappingProxyType({}),
    ) -> None:
        inner = root.module if isinstance(root, DistributedDataParallel) else root
        self._name = type(inner).__name__
        self._sync = sync
        self._find_unused = find_unused
        self._is_static = is_static
        self.partitions = partitions
        super().__init__(root, terms)

    def _make_source(self, divisor: int) -> HookSource:
        return self.source_kind(
            self,
            self._wire,
            self._failures,
            self.slots,
            bucket_bytes=self._setting.partition_bytes,
            divisor=divisor,
            find_unused=self._find_unused,
            is_static=self._is_static,
            partitions=self.partitions,
        )

    def _hook(self, root: nn.Module) -> None:
        if self._sync is not None:
            self._undo.append(self.source.hook())

    def on_close(self, undo: Callable[[], None]) -> None:
        """Calls ``undo`` after every hook has been taken off."""
        self._undo.insert(0, undo)

    # -- forward and backward ----------------------------------------------------------

    def forward_begins(self, module: nn.Module) -> None:
        """See `PlannedSession`."""
        if self._is_off:
            return
        self._check_forward()
        if are_in_a_context():
            self.raise_first(PluginError(f"this model cannot stay wrapped: {IN_A_CONTEXT}"))
        if self._sync is not None:
            if not self.source.handed_out:
                refuse_stage(module)
            self.source.is_synced = self._sync()
            if self.source.is_synced:
                self._finish()
        self._tune()
        self._meter.forward_begins()

    def backward_begins(self) -> None:
        """See `Watcher`."""
        self.source.pass_begins()
        super().backward_begins()

    def backward_ends(self) -> None:
        """See `Watcher`: a pass inside of it may have left the round open."""
        if self._sync is not None and not self._is_off and self.error is None:
            self.source.outer_ends()

    def backward_failed(self, error: BaseException) -> BaseException:
        """See `Watcher`."""
        if self.source.phase is Phase.OPEN and self.source.handed_out == self._handed_out:
            self.source.pass_failed()
            return error
        return super().backward_failed(error)

    def begin(self) -> None:
        """See `PlannedSession`: the round ends, at the latest."""
        super().begin()
        self._finish()

    def _finish(self) -> None:
        self.source.finish()
        if names := self.source.absent:
            error = UnusedParameterError(
                f"{len(names)} parameters got no gradient on rank {self._wire.rank}: "
                f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}. If that may happen, "
                "say find_unused_parameters=True to DistributedDataParallel, or to bytesched.wrap "
                "for a plain module"
            )
            self._failures.fail(error, is_raised=True)
            raise error

    # -- from outside ------------------------------------------------------------------

    def backward_gradient(self, parameter: torch.Tensor) -> None:
        """The gradient of ``parameter`` is to be reduced; called in backward."""
        self.source.backward_gradient(parameter)

    def gradient(self, parameter: torch.Tensor) -> None:
        """The gradient of ``parameter`` is to be reduced; called outside of backward."""
        if self._is_off:
            return
        if self.source.phase is not Phase.OPEN:
            self.land_all("backward")
        self.source.gradient(parameter)

    def backward_over(self) -> None:
        """No backward pass of this round is left, where `gradient` is called.

        Raises `UnusedParameterError` if a parameter has no gradient that must have one.
        """
        self._finish()

    @property
    def is_interrupted(self) -> bool:
        """Whether some gradients of a round are complete and others not."""
        return self.source.phase is Phase.OPEN and self.error is None

    def complete_round(self) -> None:
        """Every parameter that got no gradient takes part with what it has, or with zeros."""
        self._failures.check()
        if self.source.phase is not Phase.OPEN:
            self.land_all("backward")
        self.source.complete()

    @property
    def is_inside_round(self) -> bool:
        """Whether other ranks may wait for gradients of this one, and know of no error of it.

        They go on where ``step()`` has raised here, and updates nothing that they wait for.
        """
        is_unfinished = self.source.phase is Phase.OPEN or self.source.is_cut_short
        is_unfinished = is_unfinished or self._stepping.is_inside
        return self.error is None and (is_unfinished or bool(self.sending.buckets))

    def wait_reduced(self) -> None:
        """Returns when nothing is on the wire."""
        self._failures.check()
        if self.source.phase is Phase.IDLE:
            self.land_all("synchronize")

    def _change(self, setting: Setting) -> bool:
        partition_bytes = setting.partition_bytes
        if partition_bytes != self._setting.partition_bytes:
            self.let_go_of_buckets()
            self.source.resize(partition_bytes)
        self._change_rounds(setting)
        return True

    def begin_anew(self) -> None:
        """Ranks may have made different rounds, and do not from here on. Idempotent."""
        if self.source.phase is Phase.IDLE:
            self.land_all("flush")
            self.source.begin_anew()

    # -- life --------------------------------------------------------------------------

    def restore(self) -> None:
        """See `PlannedSession`."""
        self._failures.check()

    def give_back(self) -> None:
        """See `PlannedSession`."""
        self._is_off = self.source.is_off = True
        self._take_gates_off()

    def disown(self) -> None:
        """See `PlannedSession`."""
        self.source.disown()
        super().disown()

    def close(self, *, release_parameters: bool = True) -> None:
        """See `PlannedSession`."""
        self.source.is_off = True
        super().close(release_parameters=release_parameters)
