"""A session whose optimizer is in the store, once its plan is known: pushes, steps and pulls."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bytesched.config import Config
from bytesched.errors import PluginError, UnusedParameterError
from bytesched.kvstore.pipes import Chunk, Pipes
from bytesched.tunable import Setting

from ...dependency.context import Context
from ...dependency.forked import disown
from ...dependency.gates import Gates
from ...dependency.synchronizing import Synchronizing
from ...layout.packing import Packer
from ...layout.plan import Plan
from ...layout.slots import Job, Slot
from ...proxies.compiling import updating
from ...proxies.first_use import FirstUse
from ...proxies.lazy_grads import LazyGrad
from ...proxies.pending import hold, release_held
from ...routes.carrier import Traffic
from ...update.updater import Updater
from .state import gathered_state, hyperparameters_of, numbered_state, scatter_state, send_values
from .store_backend import StoreBackend
from .store_carrier import StoreCarrier

__all__ = ["StoreRunning"]


class StoreRunning:
    """The life of a StoreSession from the end of its first forward pass on (see phase.Life).

    Args:
        optimizer: the user's, whose hooks call.
        plan: of all parameters.
        config: with the sizes of chunks and window.
    """

    order = StoreCarrier.order

    def __init__(
        self,
        optimizer: weakref.ref[torch.optim.Optimizer],
        plan: Plan,
        first_use: FirstUse,
        config: Config,
        backend: StoreBackend,
        context: Context,
    ) -> None:
        self.plan = plan
        self._alive = optimizer
        self._store = backend.store
        self._rank = backend.rank
        self._progress = context.progress
        self._round = context.progress.round
        self._meter = context.meter
        self._update = _FromStore()
        self._hyperparameters: dict[str, Any] = {}
        #: of every parameter, when the store has the same value
        self._versions: dict[Slot, int] = {}
        self._round.cut(plan.chunks, plan.slots_of, plan.bundles, plan.bundles_of)
        self._packer = Packer(plan, 1, "none")
        for slot in plan.slots:
            slot.view.copy_(slot.parameter.detach())
        self._chunks: list[Chunk] = []
        for task in plan.chunks:
            buffer = plan.buffers[task.index]
            key = backend.key(str(task.index), buffer)
            self._chunks.append(Chunk(key, task, buffer, buffer, asked_for=(task,)))
        self._synchronizing = Synchronizing(plan, context.progress, context.streams, context.meter)
        self._updater = Updater(context.progress, context.streams, context.meter)
        self._pipes = Pipes(
            backend.store,
            self._chunks,
            policy=config.policy,
            push_credit_bytes=config.credit_bytes,
            pull_credit_bytes=config.credit_bytes,
            on_pulled=self._pulled,
            on_error=context.progress.fail,
            observers=context.observers,
        )
        context.progress.story = self._pipes.story
        self._undo: list[Callable[[], None]] = []
        for slot in plan.slots:
            self._versions[slot] = slot.parameter._version
            hook = slot.parameter.register_post_accumulate_grad_hook(partial(self._on_grad, slot))
            self._undo.append(hook.remove)
        gates = Gates(plan, plan.slots, first_use, self._synchronizing, _nothing)
        self._undo.append(gates.remove)
        setting = Setting(config.partition_bytes, config.credit_bytes, config.policy)
        self._meter.active(plan.nbytes, len(plan.chunks), setting)
        if optimizer() is not None and self._optimizer.state:
            self._move_state()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        """In a call of its own."""
        optimizer = self._alive()
        assert optimizer is not None
        return optimizer

    def forward_begins(self) -> None:
        pass

    def forward_ends(self) -> StoreRunning:
        return self

    # -- backward ----------------------------------------------------------------------

    def _on_grad(self, slot: Slot, parameter: torch.Tensor) -> None:
        if not self._round.is_open:
            self._begin()
        if slot.fired:
            error = PluginError(
                f"{slot.name!r} got a second gradient before step(): the first has been sent; add "
                "up the losses instead, or let the workers update"
            )
            self._progress.fail(error, is_raised=True)
            raise error
        slot.fired = 1
        assert parameter.grad is not None
        slot.give(parameter.grad.detach())
        for task in self._round.gradient(slot):
            self._packer.pack(task)
            self._packer.let_go(task)
            self._pipes.push(self._chunks[task.index])
        parameter.grad = slot.lazy
        if not self._round.missing:
            self._meter.backward_ends()

    def _begin(self) -> None:
        """The first gradient of a step; the arena is free for gradients."""
        self._progress.check()
        plan = self.plan
        self._synchronizing.wait_reduced()
        self._synchronizing.synchronize_all()
        if any(self._versions[slot] != slot.parameter._version for slot in plan.slots):
            send_values(self._store, plan, self._chunks)
        for slot in plan.slots:
            slot.lazy = _absent(slot)
        with self._progress.lock:
            self._round.begin()
        self._meter.round_begins()

    # -- step --------------------------------------------------------------------------

    def step(self) -> None:
        """``step()`` of the optimizer is called: updated parameters are asked for."""
        if not self._round.is_open:
            return
        plan = self.plan
        hyperparameters = hyperparameters_of(self._optimizer)
        if self._round.missing:
            names = [slot.name for slot in plan.slots if not slot.fired]
            error = UnusedParameterError(
                f"{len(names)} parameters got no gradient on worker {self._rank}: "
                f"{', '.join(names[:5])}; a store that updates needs one for each"
            )
            self._progress.fail(error, is_raised=True)
            raise error
        self._round.end()
        if hyperparameters != self._hyperparameters:
            self._store.set_hyperparameters(**hyperparameters)
            self._hyperparameters = hyperparameters
        with self._progress.lock:
            self._round.arm({b: [Job(self._update, {}, b.slots)] for b in plan.bundles})
        for slot in plan.slots:
            if slot.alias.data_ptr() != slot.parameter.data_ptr():
                slot.realias()
            # As the update would: a graph that has saved the old value raises.
            torch.autograd.graph.increment_version(slot.parameter)
            self._versions[slot] = slot.parameter._version + 1
            slot.parameter.grad = None
            hold(slot.parameter, slot.synchronize)
        for chunk in self._chunks:
            self._pipes.ask(chunk)
        self._meter.stepped(plan.nbytes)
        self._meter.step_ends()

    def _pulled(self, chunk: Chunk) -> None:
        with self._progress.lock:
            self._updater.push(self._round.summed(chunk.push_task))
            self._progress.notify()

    # -- state -------------------------------------------------------------------------

    def with_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict of the optimizer, with the store's state where a checkpoint has it."""
        entries = gathered_state(self._store, self.plan, self._chunks)
        return {**state, "state": numbered_state(self._optimizer, entries)}

    def state_loaded(self) -> None:
        """What was loaded goes to the store; every worker loads."""
        if self._optimizer.state:
            self._progress.check()
            self.synchronize_all()
            self._move_state()

    def _move_state(self) -> None:
        scatter_state(self._store, self.plan, self._chunks, self._optimizer.state)
        self._optimizer.state.clear()

    # -- from outside ------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        pulls = self._pipes.pulls
        return Traffic(pulls.busy_ns, pulls.tasks_started, pulls.bytes_started, pulls.cpu_ns)

    def synchronize_all(self) -> None:
        self._synchronizing.synchronize_all()

    def state(self) -> str:
        return self._synchronizing.state()

    def disown(self) -> None:
        disown(self._round, self.plan, None)

    def close(self, *, release_parameters: bool) -> None:
        for undo in reversed(self._undo):
            undo()
        self._pipes.close()
        self._updater.close()
        if release_parameters:
            release_held(slot.parameter for slot in self.plan.slots)
        for slot in self.plan.slots:
            if slot.parameter.grad is slot.lazy:
                slot.parameter.grad = None


class _FromStore:
    """The update of a bundle: parameters get the values that lie in their buffers."""

    def update(self, groups: list[tuple[dict[str, Any], list[Slot]]]) -> None:
        slots = [slot for _, members in groups for slot in members]
        with updating(), torch.no_grad():
            for slot in slots:
                slot.alias.copy_(slot.view)


def _absent(slot: Slot) -> LazyGrad:
    """A gradient of which only shape and dtype are here; to use it is a PluginError."""
    parameter = slot.parameter
    nothing = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    grad = nothing.as_subclass(LazyGrad)

    def refuse() -> None:
        raise PluginError(
            f"the gradient of {slot.name!r} is in the store, which updates: it cannot be read, "
            "clipped or changed here; let the workers update (a store without an optimizer)"
        )

    grad.synchronize = refuse
    grad.is_taken = lambda: False
    return grad


def _nothing() -> None:
    """Compiled code waits at its own gate, in front of the whole."""
