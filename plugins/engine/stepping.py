"""``optimizer.step()``: redirected to what can be updated at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bytesched.errors import PluginError

from ..dependency.context import Context
from ..routes.handover import Handover
from ..update.deferred import Deferred
from ..update.late import LateGroups
from ..update.pending_updates import why_now
from .rounds import Rounds

__all__ = ["Stepping"]


class Stepping:
    """The optimizers of one model.

    ``step()`` is redirected, in a pre-hook, to a copy of the optimizer that holds only what can
    be updated at once. The method itself is never replaced: learning-rate schedulers patch it.
    An optimizer is not kept alive, except by updates that are outstanding.

    Args:
        takes_gradients: no step is ever the user's own over everything, and once it is taken no
            gradient can be read: so it is taken after all hooks and the closure.
    """

    def __init__(
        self, rounds: Rounds, handover: Handover, context: Context, *, takes_gradients: bool
    ) -> None:
        self._rounds = rounds
        self._handover = handover
        self._takes_gradients = takes_gradients
        self._progress = context.progress
        self._meter = context.meter
        self._names = {id(slot.parameter): slot.name for slot in rounds.slots}
        self._deferred: list[Deferred] = []
        self._handles: list[RemovableHandle] = []
        #: calls of ``step()``, of all optimizers
        self.steps = 0

    def add(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        model: nn.Module | None,
        *,
        cross: bool,
    ) -> None:
        """Hooks ``optimizer``, which ``kind`` updates, and which keeps ``model`` alive."""
        self._deferred = [other for other in self._deferred if other.is_alive]
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for other in self._deferred:
            shared = mine & other.parameter_ids() & self._names.keys()
            if shared:
                name = self._names[shared.pop()]
                raise PluginError(f"parameter {name!r} is in two optimizers")
        deferred = Deferred(optimizer, kind, self._synchronize_all, cross=cross)
        handles: list[RemovableHandle] = []
        try:
            handles.append(optimizer.register_step_pre_hook(partial(self._before_step, deferred)))
            deferred.hook_id = handles[0].id
            handles.append(optimizer.register_step_post_hook(partial(self._after_step, deferred)))
            # Before those of the script: what they write is no part of the update.
            post_hooks: Any = optimizer._optimizer_step_post_hooks
            post_hooks.move_to_end(handles[1].id, last=False)
            handles += [
                optimizer.register_state_dict_pre_hook(lambda _: self._synchronize_all()),
                optimizer.register_load_state_dict_pre_hook(partial(self._before_load, model)),
                optimizer.register_load_state_dict_post_hook(lambda _: deferred.guard()),
            ]
        except BaseException:
            for handle in handles:
                handle.remove()
            deferred.unguard()
            raise
        self._handles += handles
        self._deferred.append(deferred)
        self._rounds.phase.introduce(deferred)

    def close(self) -> None:
        """Takes the hooks off; nothing is applied."""
        for handle in self._handles:
            handle.remove()
        for deferred in self._deferred:
            deferred.unguard()

    @property
    def crosses(self) -> bool:
        """True if some optimizer is updated after its ``step()``."""
        return any(deferred.cross for deferred in self._deferred)

    def stop_crossing(self) -> None:
        """From the next ``step()`` on, all parameters are updated within it."""
        for deferred in self._deferred:
            deferred.cross = False

    def _synchronize_all(self) -> None:
        if not self._handover.off:
            self._rounds.phase.synchronize_all()

    def _before_load(self, model: nn.Module | None, *_: Any) -> None:
        self._synchronize_all()

    def _before_step(
        self, deferred: Deferred, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        if deferred.is_outer():
            return None
        closure, has_arguments = deferred.arguments(args[1:], kwargs)
        # Before the copy is made: a whole step is that of the optimizer itself.
        why = "step() was called with arguments" if has_arguments else why_now(optimizer)
        # A hook that runs after ours may still change gradients or hyper-parameters.
        hooked = next(reversed(optimizer._optimizer_step_pre_hooks)) != deferred.hook_id
        is_last = self._takes_gradients or (deferred.cross and not hooked and not why)
        if self._handover.off or not is_last or (closure is None and not hooked):
            if closure is not None:
                why = why or "step(closure)"
            if hooked:
                why = "a pre-hook of step() was registered after the wrap"
            eager = self._updates(deferred, whole_because=why)
            if eager is None:
                return None
            deferred.steps(eager)
            return (deferred.copy(eager), *args[1:]), kwargs
        copied = deferred.copy_of_nothing()
        update = partial(self._update_last, deferred, copied, whole_because=why)
        if closure is None:
            copied.param_groups = LateGroups(update)
            return (copied, *args[1:]), kwargs
        evaluate = partial(self._evaluate, closure, update)
        if "closure" in kwargs:
            return (copied, *args[1:]), {**kwargs, "closure": evaluate}
        return (copied, evaluate, *args[2:]), kwargs

    def _evaluate(self, closure: Callable[[], Any], update: Callable[[], object]) -> Any:
        """What a redirected ``step()`` calls before it updates; returns the user's loss.

        The backward pass may be in here, so that what it updates is known only then.
        """
        loss = closure()
        update()
        return loss

    def _update_last(
        self, deferred: Deferred, copied: torch.optim.Optimizer, *, whole_because: str
    ) -> list[dict[str, Any]]:
        """``step()`` of ``copied`` is about to update: these groups."""
        eager = self._updates(deferred, whole_because=whole_because)
        groups = deferred.optimizer.param_groups if eager is None else eager
        # Not the groups alone: the closure or a hook may have loaded or made another state.
        deferred.guard()
        deferred.steps(groups)
        copied.__dict__.update(deferred.copy(groups).__dict__)
        return groups

    def _updates(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]] | None:
        """Gradients are complete; see `Phase.step`."""
        self.steps += 1
        if self._handover.off:
            return None
        self._progress.check()
        self._meter.step_begins()
        self._rounds.finish()
        by_hand = self._rounds.by_hand
        if by_hand is not None and by_hand.step_begins():
            self._rounds.by_hand = None
        return self._rounds.phase.step(deferred, whole_because=whole_because)

    def _after_step(
        self, deferred: Deferred, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        if self._handover.off or deferred.is_outer():
            return
        if args[0] is not optimizer:
            deferred.stepped(args[0])
        self._rounds.phase.stepped()
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(deferred.hook_id)
        self._meter.step_ends()
