"""``optimizer.step()``: it arms the updates of what is still on the wire, and returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bytesched.errors import PluginError
from bytesched.plugins.layout.slots import Bundle, Job, Slot
from bytesched.plugins.optimizer.deferred import Deferred, snapshot
from bytesched.plugins.proxies.pending import hold
from bytesched.plugins.session.meter import Meter
from bytesched.plugins.session.progress import Progress
from bytesched.plugins.session.rounds import Rounds
from bytesched.plugins.session.settling import Settling
from bytesched.plugins.session.streams import Streams
from bytesched.plugins.session.updater import Updater

__all__ = ["Stepping"]


class Stepping:
    """The optimizers of one model.

    ``step()`` is redirected, in a pre-hook, to a copy of the optimizer that holds only what can
    be updated at once. The method itself is never replaced: learning-rate schedulers patch it.
    """

    def __init__(self, rounds: Rounds, progress: Progress, streams: Streams, meter: Meter) -> None:
        self._rounds = rounds
        self._progress = progress
        self._streams = streams
        self._meter = meter
        self._slots = {id(slot.parameter): slot for slot in rounds.slots}
        self._deferred: list[Deferred] = []
        #: calls of ``step()``, of all optimizers
        self.steps = 0
        #: ``step()`` is nobody's but the optimizer's at the moment
        self.off = False
        #: slots whose gradient is a plain tensor for the length of one whole step
        self._stepped_plain: list[Slot] = []
        # - after the warm-up
        self._settling: Settling | None = None
        self._updater: Updater

    def activate(self, settling: Settling, updater: Updater) -> None:
        """The warm-up is over."""
        self._settling = settling
        self._updater = updater
        for deferred in self._deferred:
            self._introduce(deferred)

    def add(
        self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer], *, cross: bool
    ) -> list[Callable[[], None]]:
        """Hooks ``optimizer``, which ``kind`` updates; returns what takes the hooks off again."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for other in self._deferred:
            shared = mine & other.parameter_ids() & self._slots.keys()
            if shared:
                name = self._slots[shared.pop()].name
                raise PluginError(f"parameter {name!r} is in two optimizers")
        deferred = Deferred(optimizer, kind, self._settle_all, cross=cross)
        self._deferred.append(deferred)
        if self._settling is not None:
            self._introduce(deferred)
        before_step = optimizer.register_step_pre_hook(partial(self._before_step, deferred))
        deferred.hook_id = before_step.id
        handles = (
            before_step,
            optimizer.register_step_post_hook(partial(self._after_step, deferred)),
            optimizer.register_state_dict_pre_hook(lambda _: self._settle_all()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._settle_all()),
            optimizer.register_load_state_dict_post_hook(lambda _: deferred.guard()),
        )
        return [deferred.unguard, *(handle.remove for handle in handles)]

    @property
    def crosses(self) -> bool:
        """True if some optimizer is updated after its ``step()``."""
        return any(deferred.cross for deferred in self._deferred)

    def stop_crossing(self) -> None:
        """From the next ``step()`` on, all parameters are updated within it."""
        for deferred in self._deferred:
            deferred.cross = False

    def _introduce(self, deferred: Deferred) -> None:
        for slot in self._slots.values():
            deferred.know(slot)

    def _settle_all(self) -> None:
        if self._settling is not None and not self.off:
            self._settling.settle_all()

    def _before_step(
        self, deferred: Deferred, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        if deferred.is_outer():
            return None
        self.steps += 1
        if self.off:
            return None
        self._progress.check()
        self._meter.step_begins()
        self._rounds.finish()
        if self._settling is None:
            return None
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        # A closure evaluates the model again; a fused step under GradScaler finds the scale in
        # an attribute that is taken away after step().
        whole = closure is not None or hasattr(optimizer, "grad_scale")
        # A hook that runs after ours may still change gradients or hyper-parameters.
        whole = whole or next(reversed(optimizer._optimizer_step_pre_hooks)) != deferred.hook_id
        if not self._progress.outstanding or not deferred.cross or whole:
            self._settling.wait_reduced()
            self._settling.settle_all()
            self._plain_grads(optimizer)
            self._meter.stepped(0)
            return None
        deferred.guard()
        eager, armed = self._sort(deferred, self._settling)
        self._arm(armed)
        return (deferred.copy(eager), *args[1:]), kwargs

    def _sort(
        self, deferred: Deferred, settling: Settling
    ) -> tuple[list[dict[str, Any]], dict[Bundle, list[Job]]]:
        """Groups of what must be stepped right now, and by bundle what can be armed."""
        eager: list[dict[str, Any]] = []
        armed: dict[Bundle, list[Job]] = {}
        for group in deferred.optimizer.param_groups:
            taken: dict[str, Any] | None = None
            now = []
            for parameter in group["params"]:
                slot = self._slots.get(id(parameter))
                if slot is not None and slot.used and parameter.grad is slot.lazy:
                    if taken is None:
                        taken = snapshot(group)
                        self._streams.lend(taken.values())
                    if slot.alias.data_ptr() != parameter.data_ptr():
                        slot.realias()
                        deferred.know(slot)
                    slot.used, slot.taken = False, True
                    jobs = armed.setdefault(slot.bundle, [])
                    if not jobs or jobs[-1].hyperparameters is not taken:
                        jobs.append(Job(deferred, taken))
                    jobs[-1].slots.append(slot)
                elif parameter.grad is not None:
                    if slot is not None:
                        settling.settle(slot.bundle, slot.name)
                    now.append(parameter)
            if now:
                eager.append({**group, "params": now})
        return eager, armed

    def _arm(self, armed: dict[Bundle, list[Job]]) -> None:
        self._streams.stepped()
        # Before any update can be applied: a parameter is free only after it was held.
        for jobs in armed.values():
            for job in jobs:
                for slot in job.slots:
                    hold(slot.parameter, slot.settle)
        crossing_bytes = 0
        with self._progress.changed:
            for bundle, jobs in armed.items():
                bundle.jobs.extend(jobs)
                bundle.armed = bundle.held = True
                if bundle.sending:
                    crossing_bytes += bundle.nbytes
            self._updater.push(bundle for bundle in armed if not bundle.sending)
        self._meter.stepped(crossing_bytes)

    def _plain_grads(self, optimizer: torch.optim.Optimizer) -> None:
        """What is reduced needs no lazy view: torch's fast paths want plain tensors."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slot = self._slots.get(id(parameter))
                if slot is not None:
                    slot.used = False
                    if parameter.grad is slot.lazy:
                        parameter.grad = slot.view
                        self._stepped_plain.append(slot)

    def _after_step(
        self, deferred: Deferred, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        if self.off or deferred.is_outer():
            return
        for slot in self._stepped_plain:
            if slot.parameter.grad is slot.view:
                slot.parameter.grad = slot.lazy
        self._stepped_plain.clear()
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(deferred.hook_id)
        self._meter.step_ends()
