"""What ``hvd.DistributedOptimizer`` made, with its all-reduces replaced by a session."""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import horovod.torch as hvd
import torch

from bytesched.errors import PluginError

from ..planned.bundles import Slot
from ..planned.hooked_session import HookedSession
from .hvd_wire import HorovodWire
from .operations import HorovodTimeout, is_done

#: between two looks at an operation of Horovod's own
_LOOK_S: Final = 5e-4


class Shell:
    """Stands in for four methods of one optimizer, on the instance; the class stays as it is.

    Args:
        session: what reduces ``slots``. Other parameters stay with Horovod.
        kind: the class beneath Horovod's.
    """

    def __init__(
        self,
        optimizer: Any,
        session: HookedSession,
        slots: Sequence[Slot],
        wire: HorovodWire,
        kind: type[torch.optim.Optimizer],
    ) -> None:
        # The session, which is there until its model is gone, holds this shell.
        self._alive = weakref.ref(optimizer)
        self._session = session
        self._wire = wire
        self._slots = {slot.parameter: slot for slot in slots}
        self._kind = kind
        self._rounds = 0
        #: Horovod's handles of parameters that share a group with ours
        self._beside: dict[torch.Tensor, tuple[Any, Any]] = {}
        own = type(optimizer)
        self._horovods_gradient = own._allreduce_grad_async
        self._horovods_synchronize = own.synchronize
        self._step_code = inspect.unwrap(own.step).__code__

    @property
    def _optimizer(self) -> Any:
        """In a call of the optimizer's own, and as long as there is one; None after that."""
        return self._alive()

    def take_over(self) -> Callable[[], None]:
        """Puts the methods in place; returns what takes them away again."""
        optimizer = self._optimizer
        optimizer._requires_update -= self._slots.keys()
        methods = {
            "_allreduce_grad_async": self._gradient,
            "_grouped_allreduce_grad_async": self._gradients,
            "synchronize": self._synchronize,
            "zero_grad": self._zero_grad,
        }
        vars(optimizer).update(methods)

        def give_back() -> None:
            optimizer = self._optimizer
            if optimizer is None:
                return
            if self._session.rounds_finished == self._rounds:
                self._forget_handles()
            else:
                self._leave_handles()
            optimizer._requires_update |= self._slots.keys()
            for name in methods:
                del vars(optimizer)[name]

        return give_back

    def _gradient(self, parameter: torch.Tensor) -> tuple[Any, Any]:
        """Horovod's hook: the gradient of ``parameter`` is complete. Returns handle, context."""
        slot = self._slots.get(parameter)  # type: ignore[call-overload]
        if slot is None:
            handle: tuple[Any, Any] = self._horovods_gradient(self._optimizer, parameter)
            return handle
        if parameter.grad is not None and parameter.grad.is_sparse:
            # Chunks are dense, and were agreed on already.
            error = PluginError(
                f"the gradient of {slot.name!r} is sparse on rank {hvd.rank()}, which "
                "nothing announced. Use nn.Embedding(sparse=True), which does and leaves it to "
                "Horovod, or make the gradient dense, or do not wrap this optimizer"
            )
            self._session.fail(error)
            raise error
        self._session.backward_gradient(parameter)
        return self, None

    def _gradients(self, group: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        for parameter in group:
            handle = self._gradient(parameter)
            if handle[0] is not self:
                self._beside[parameter] = handle
        return self, [None] * len(group)

    def _synchronize(self) -> None:
        """Ends the round. Waits for it only if the user asks, not on behalf of ``step()``."""
        self._forget_handles()
        if self._session.rounds_finished == self._rounds:
            self._session.complete_round()
        self._rounds = self._session.rounds_finished
        self._synchronize_others()
        if sys._getframe(1).f_code is not self._step_code:
            self._session.wait_reduced()

    def _synchronize_others(self) -> None:
        deadline = time.monotonic() + self._wire.timeout_s
        for handle in self._others_under_way():
            # What Horovod's own method would spin for, without a limit.
            while not is_done(handle):
                if self._session.error is not None:
                    raise self._session.error.with_traceback(None)
                if time.monotonic() > deadline:
                    error = HorovodTimeout(
                        f"waited {self._wire.timeout_s:g} s for what Horovod reduces itself, "
                        "sparse gradients for one",
                        rank=self._wire.rank,
                    )
                    self._session.fail(error)
                    raise error
                time.sleep(_LOOK_S)
        self._horovods_synchronize(self._optimizer)

    def _others_under_way(self) -> list[int]:
        """Horovod's handles of its own operations."""
        found: list[int] = []
        for handle, _ in self._optimizer._handles.values():
            if isinstance(handle, int):
                found.append(handle)
            elif inspect.isfunction(handle):
                # sparse_allreduce_async: indices and values are gathered, each with a handle.
                inside = inspect.getclosurevars(handle).nonlocals
                found += [inside[name] for name in inside if name.endswith("_handle")]
        return found

    def _forget_handles(self) -> None:
        """Our parameters are as they were before backward."""
        optimizer = self._optimizer
        for key in list(optimizer._handles):
            if key in self._slots or isinstance(key, tuple):
                del optimizer._handles[key]
        optimizer._handles.update(self._beside)
        self._beside.clear()
        for parameter in self._slots:
            optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
        for group in optimizer._group_counts:
            optimizer._group_counts[group] = 0

    def _leave_handles(self) -> None:
        """Gradients that are reduced look to Horovod like those it has reduced itself."""
        optimizer = self._optimizer
        self._forget_handles()
        for parameter in self._slots:
            optimizer._handles[parameter] = (partial(getattr, parameter, "grad"), parameter.dtype)
            optimizer._allreduce_delay[parameter] = 0

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if self._optimizer._handles:
            raise AssertionError(
                "optimizer.zero_grad() was called between loss.backward() and optimizer.step() "
                "or optimizer.synchronize(): gradients are being reduced"
            )
        self._kind.zero_grad(self._optimizer, set_to_none)
