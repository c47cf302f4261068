"""A session whose optimizer is in the store: gradients go there, and parameters come back.

The store updates a key when all workers have pushed it and worker 0 has called ``step()``, under
the hyper-parameters that hold then. The optimizer's state is in the store alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from bytesched.config import Config
from bytesched.errors import PluginError, UnusedParameterError
from bytesched.kvstore.pipes import Chunk, Pipes
from bytesched.observe import Observers
from bytesched.plugins.kvstore.training.backend import StoreBackend
from bytesched.plugins.kvstore.training.carrier import StoreCarrier
from bytesched.plugins.kvstore.training.standins import TakeOver, absent
from bytesched.plugins.kvstore.training.state import (
    gathered_state,
    hyperparameters_of,
    numbered_state,
    scatter_state,
    send_values,
)
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.layout.slots import Job, Slot
from bytesched.plugins.proxies.first_use import StayingForwardHook, StayingHook, gate
from bytesched.plugins.proxies.pending import hold
from bytesched.plugins.session.carrier import Traffic
from bytesched.plugins.session.hooked import HookedModel
from bytesched.plugins.session.settling import Settling
from bytesched.plugins.session.updater import Updater

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
    _backend: StoreBackend

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
        self._slots = list(slots)
        self._optimizer = optimizer
        self._config = config
        self._take_over = TakeOver()
        self._hyperparameters: dict[str, Any] = {}
        #: of every parameter, when the store has the same value
        self._versions: dict[Slot, int] = {}
        self._missing = 0
        self._is_open = False
        # - after the first forward pass
        self._chunks: list[Chunk] = []
        self._packer: Packer
        self._pipes: Pipes
        before = StayingHook(self._before_forward)
        self._undo.append(root.register_forward_pre_hook(before, prepend=True).remove)
        after = StayingForwardHook(self._after_forward)
        self._undo.append(root.register_forward_hook(after, always_call=True).remove)
        for handle in (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_state_dict_post_hook(self._add_state),
            optimizer.register_load_state_dict_post_hook(self._send_state),
        ):
            self._undo.append(handle.remove)

    # -- forward -----------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            if not module.training:
                self._settle_all()
            return
        self._progress.check()
        self._meter.forward_begins()
        if self.plan is None:
            self._first_use.begin()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self.plan is None:
            self._first_use.end()
            self._first_use.close()
            self._activate()
        self._meter.forward_ends()

    def _activate(self) -> None:
        """The order is known; collective."""
        order = torch.tensor(self._first_use.order())
        if self._backend.rank:
            order.zero_()
        self._backend.wait(self._backend.sum(order, "order"), task="the first forward pass")
        plan = Plan(
            [self._slots[index] for index in order.tolist()],
            partition_bytes=self._config.partition_bytes,
        )
        self._packer = Packer(plan, 1, "none")
        for slot in plan.slots:
            slot.view.copy_(slot.parameter.detach())
        for task in plan.chunks:
            buffer = plan.buffers[task.index]
            key = self._backend.key(str(task.index), buffer)
            self._chunks.append(Chunk(key, task, buffer, buffer, asked_for=(task,)))
        self._settling = Settling(plan, self._progress, self._streams, self._meter)
        self._updater = Updater(self._progress, self._streams, self._meter)
        self._pipes = Pipes(
            self._backend.store,
            self._chunks,
            policy=self._config.policy,
            push_credit_bytes=self._config.credit_bytes,
            pull_credit_bytes=self._config.credit_bytes,
            on_pulled=self._pulled,
            on_error=self._progress.fail,
            observers=self._observers,
        )
        self._progress.story = self._pipes.story
        for slot in plan.slots:
            self._versions[slot] = slot.parameter._version
            hook = slot.parameter.register_post_accumulate_grad_hook(partial(self._on_grad, slot))
            self._undo.append(hook.remove)
        self._raise_gates(plan)
        self._meter.active(plan, self._config.partition_bytes, self._config.credit_bytes)
        if self._optimizer.state:
            self._move_state(plan)
        self.plan = plan

    def _raise_gates(self, plan: Plan) -> None:
        names = {module: name for name, module in self.root.named_modules()}
        slots = {id(slot.parameter): slot for slot in plan.slots}
        for module, parameters in self._first_use.gates(lambda p: id(p) in slots).items():
            bundles = {slots[id(parameter)].bundle for parameter in parameters}
            ordered = sorted(bundles, key=lambda bundle: bundle.index)
            name = names.get(module) or type(module).__name__
            self._undo.append(gate(module, partial(self._settling.gate, ordered, name), _nothing))

    # -- backward ----------------------------------------------------------------------

    def _on_grad(self, slot: Slot, parameter: torch.Tensor) -> None:
        if not self._is_open:
            self._begin()
        if slot.fired:
            error = PluginError(
                f"{slot.name!r} got a second gradient before step(): the first has been sent; add "
                "up the losses instead, or let the workers update"
            )
            self._progress.fail(error)
            raise error
        slot.fired = 1
        self._missing -= 1
        assert parameter.grad is not None
        slot.grad = parameter.grad.detach()
        for task in slot.chunks:
            if task.notify_ready():
                self._packer.pack(task)
                self._packer.let_go(task)
                self._pipes.push(self._chunks[task.index])
        parameter.grad = slot.lazy
        if not self._missing:
            self._meter.backward_ends()

    def _begin(self) -> None:
        """The first gradient of a step; the arena is free for gradients."""
        self._progress.check()
        plan = self.plan
        assert plan is not None
        self._settling.wait_reduced()
        self._settling.settle_all()
        if any(self._versions[slot] != slot.parameter._version for slot in plan.slots):
            send_values(self._backend.store, plan, self._chunks)
        for slot in plan.slots:
            slot.fired = 0
            slot.sending = len(slot.chunks)
            slot.lazy = absent(slot)
        for bundle in plan.bundles:
            bundle.sending = len(bundle.chunks)
        self._missing = len(plan.slots)
        self._is_open = True

    # -- step --------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        self._progress.check()
        self._meter.step_begins()
        if kwargs.get("closure") or len(args) > 1:
            raise PluginError("step(closure) needs gradients here, and the optimizer is elsewhere")
        if self._is_open:
            self._step(hyperparameters_of(optimizer))
        copied = copy.copy(optimizer)
        copied.param_groups = []
        return (copied, *args[1:]), kwargs

    def _step(self, hyperparameters: dict[str, Any]) -> None:
        plan = self.plan
        assert plan is not None
        if self._missing:
            names = [slot.name for slot in plan.slots if not slot.fired]
            error = UnusedParameterError(
                f"{len(names)} parameters got no gradient on worker {self._backend.rank}: "
                f"{', '.join(names[:5])}; a store that updates needs one for each"
            )
            self._progress.fail(error)
            raise error
        self._is_open = False
        if hyperparameters != self._hyperparameters:
            self._backend.store.set_hyperparameters(**hyperparameters)
            self._hyperparameters = hyperparameters
        self._progress.outstanding = len(plan.chunks)
        for bundle in plan.bundles:
            bundle.jobs = [Job(self._take_over, {}, list(bundle.slots))]
            bundle.armed = bundle.held = True
        for slot in plan.slots:
            if slot.alias.data_ptr() != slot.parameter.data_ptr():
                slot.realias()
            self._versions[slot] = slot.parameter._version + 1
            slot.parameter.grad = None
            hold(slot.parameter, slot.settle)
        for chunk in self._chunks:
            self._pipes.ask(chunk)
        self._meter.stepped(plan.nbytes)
        self._meter.step_ends()

    def _pulled(self, chunk: Chunk) -> None:
        plan = self.plan
        assert plan is not None
        with self._progress.changed:
            complete = []
            for bundle in plan.bundles_of[chunk.push_task.index]:
                bundle.sending -= 1
                if not bundle.sending:
                    complete.append(bundle)
            self._updater.push(complete)
            self._progress.outstanding -= 1
            self._progress.notify()

    # -- state -------------------------------------------------------------------------

    def _add_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The store's state, where a checkpoint has it."""
        self.flush()
        if self.plan is None:
            return state
        entries = gathered_state(self._backend.store, self.plan, self._chunks)
        return {**state, "state": numbered_state(optimizer, entries)}

    def _send_state(self, optimizer: torch.optim.Optimizer) -> None:
        """What was loaded goes to the store; every worker loads."""
        # Before the first forward pass there is no plan: it goes with the first parameters.
        if not optimizer.state or self.plan is None:
            return
        self.flush()
        self._move_state(self.plan)

    def _move_state(self, plan: Plan) -> None:
        scatter_state(self._backend.store, plan, self._chunks, self._optimizer.state)
        self._optimizer.state.clear()

    # -- from outside ------------------------------------------------------------------

    def _stop_sending(self) -> None:
        self._pipes.close()

    def _give_back(self, slot: Slot, *, is_failed: bool) -> None:
        if slot.parameter.grad is slot.lazy:
            slot.parameter.grad = None

    def stats(self) -> dict[str, int | float | str]:
        """Figures since the first forward pass: those of `bytesched.figures.Figures`."""
        return self._figures(self._traffic(), StoreCarrier.order)

    def _traffic(self) -> Traffic:
        if self.plan is None:
            return Traffic()
        pulls = self._pipes.pulls
        return Traffic(pulls.busy_ns, pulls.tasks_started, pulls.bytes_started, pulls.cpu_ns)


def _nothing() -> None:
    """Compiled code waits at its own gate, in front of the whole."""
