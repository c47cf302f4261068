"""``optimizer.step()``: redirected to what can be updated at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bytesched.errors import PluginError

from ..figures.meter import Meter
from ..update.deferred import Deferred
from ..update.surroundings import has_modes, why_not_frozen
from .updates import Updates

log = logging.getLogger("bytesched")


class Stepping:
    """The optimizers of one model.

    ``step()`` is redirected, in a pre-hook, to a copy of the optimizer that holds only what can
    be updated at once. The method itself is never replaced: learning-rate schedulers patch it.
    An optimizer is not kept alive, except by updates that are outstanding.

    Args:
        updates: what steps come to.
        names: of the parameters of the model, by their ids.
        begin: an update is about to begin: raises the first error, if there was one.
        is_off: whether steps are the optimizers' own at the moment.
        synchronize: applies every update that is owed.
    """

    def __init__(
        self,
        updates: Updates,
        names: Mapping[int, str],
        meter: Meter,
        *,
        begin: Callable[[], None],
        is_off: Callable[[], bool],
        synchronize: Callable[[], None],
    ) -> None:
        self._updates = updates
        self._names = names
        self._begin = begin
        self._meter = meter
        self._is_off = is_off
        self._synchronize = synchronize
        #: with what takes their hooks off
        self._deferred: dict[Deferred, list[RemovableHandle]] = {}
        #: calls of ``step()``, of all optimizers
        self.steps = 0
        #: those whose ``step()`` has begun, and has not ended
        self._begun: set[Deferred] = set()

    def add(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        model: nn.Module | None,
        *,
        cross: bool,
    ) -> None:
        """Hooks ``optimizer``, which ``kind`` updates, and which keeps ``model`` alive.

        One that has its parameters already, which the script is about to let go of, steps by itself
        from now on.
        """
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for other in list(self._deferred):
            shared = other.is_alive and mine & other.parameter_ids() & self._names.keys()
            if shared and self._updates.takes_gradients:
                name = self._names[shared.pop()]
                raise PluginError(f"parameter {name!r} is in two optimizers: let go of the first")
            if shared:
                name = self._names[shared.pop()]
                log.info("an older optimizer has %r, and is no longer deferred", name)
            if shared or not other.is_alive:
                self._leave(other)
        deferred = Deferred(optimizer, kind, self._synchronize, cross=cross)
        loaded = partial(self._after_load, deferred, model)
        keeper = optimizer.register_load_state_dict_post_hook(loaded)
        self._deferred[deferred] = [keeper]
        try:
            self._hook(deferred)
        except BaseException:
            self._unhook(self._deferred.pop(deferred), deferred)
            raise
        self._updates.introduce(deferred)

    def _hook(self, deferred: Deferred) -> None:
        optimizer, handles = deferred.optimizer, self._deferred[deferred]
        before = optimizer.register_step_pre_hook(partial(self._before_step, deferred))
        deferred.hook_id = before.id
        after = optimizer.register_step_post_hook(partial(self._after_step, deferred))
        # Before those of the script: what they write is no part of the update.
        post_hooks: Any = optimizer._optimizer_step_post_hooks
        post_hooks.move_to_end(after.id, last=False)
        handles += [
            before,
            after,
            optimizer.register_state_dict_pre_hook(lambda _: self._synchronize()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._synchronize()),
        ]

    def _unhook(self, handles: list[RemovableHandle], deferred: Deferred) -> None:
        while handles:
            handles.pop().remove()
        deferred.unguard()

    def rest(self) -> None:
        """Steps are the optimizers' own until `wake`; nothing is owed."""
        for deferred, handles in self._deferred.items():
            if handles and deferred not in self._begun:
                # The first one keeps the model, and is told when a state is loaded.
                keeper = handles.pop(0)
                self._unhook(handles, deferred)
                handles.append(keeper)

    def wake(self) -> None:
        """They are deferred again."""
        for deferred, handles in self._deferred.items():
            if deferred.is_alive and len(handles) == 1:
                deferred.guard()
                self._hook(deferred)

    def _leave(self, deferred: Deferred) -> None:
        """Its steps are the optimizer's own."""
        self._synchronize()
        self._unhook(self._deferred.pop(deferred), deferred)
        self._begun.discard(deferred)

    def close(self) -> None:
        """Takes the hooks off; nothing is applied."""
        for deferred, handles in self._deferred.items():
            self._unhook(handles, deferred)

    def _after_load(self, deferred: Deferred, model: nn.Module | None, *_: Any) -> None:
        deferred.loaded(is_guarded=len(self._deferred[deferred]) > 1)

    @property
    def crosses(self) -> bool:
        """True if some optimizer is updated after its ``step()``."""
        return any(deferred.cross for deferred in self._deferred)

    @property
    def is_inside(self) -> bool:
        """Whether some ``step()`` has begun that has not ended, unless by an exception."""
        return bool(self._begun)

    def stop_crossing(self) -> None:
        """From the next ``step()`` on, all parameters are updated within it."""
        for deferred in self._deferred:
            deferred.cross = False

    def _before_step(
        self, deferred: Deferred, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        if deferred.is_outer():
            return None
        closure, has_arguments = deferred.arguments(args[1:], kwargs)
        # Before the copy is made: a whole step is that of the optimizer itself.
        why = "step() was called with arguments" if has_arguments else why_now(optimizer)
        if deferred.cross:
            why = why or deferred.why_replaced()
        # A hook that runs after ours may still change gradients or hyper-parameters.
        hooked = next(reversed(optimizer._optimizer_step_pre_hooks)) != deferred.hook_id
        is_last = self._updates.takes_gradients or (deferred.cross and not hooked and not why)
        if self._is_off() or not is_last or (closure is None and not hooked):
            if closure is not None:
                why = why or "step(closure)"
            if hooked:
                why = "a pre-hook of step() was registered after the wrap"
            eager = self._step(deferred, whole_because=why)
            if eager is None:
                return None
            deferred.steps(eager)
            return (deferred.copy(eager), *args[1:]), kwargs
        copied = deferred.copy([{**group, "params": []} for group in optimizer.param_groups])
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
        eager = self._step(deferred, whole_because=whole_because)
        groups = deferred.optimizer.param_groups if eager is None else eager
        # Not the groups alone: the closure or a hook may have loaded or made another state.
        deferred.guard()
        deferred.steps(groups)
        copied.__dict__.update(deferred.copy(groups).__dict__)
        return groups

    def _step(self, deferred: Deferred, *, whole_because: str) -> list[dict[str, Any]] | None:
        """Gradients are complete; see `Updates.step`."""
        self.steps += 1
        if self._is_off():
            return None
        self._begun.add(deferred)
        self._meter.step_begins()
        self._begin()
        whole_because = whole_because or why_now(deferred.optimizer)
        return self._updates.step(deferred, whole_because=whole_because)

    def _after_step(
        self, deferred: Deferred, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        if self._is_off() or deferred.is_outer():
            return
        self._begun.discard(deferred)
        if args[0] is not optimizer:
            deferred.stepped(args[0])
        self._updates.stepped()
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(deferred.hook_id)
        self._meter.step_ends()


def why_now(optimizer: torch.optim.Optimizer) -> str:
    """Why this step cannot be taken later in another thread; empty if it can."""
    # GradScaler's scale is in an attribute that is taken away after a fused step().
    if hasattr(optimizer, "grad_scale"):
        return "a fused step under GradScaler"
    # A mode sees every operation of its thread.
    if has_modes():
        return "a torch function or dispatch mode around step()"
    return why_not_frozen(optimizer.param_groups)


class LateGroups(list[dict[str, Any]]):
    """The groups that a function returns, which is called when somebody first looks.

    An optimizer's ``step()`` looks after all of its pre-hooks have run.
    """

    def __init__(self, find: Callable[[], list[dict[str, Any]]]) -> None:
        super().__init__()
        self._find: Callable[[], list[dict[str, Any]]] | None = find

    def _look(self) -> None:
        if (find := self._find) is not None:
            self._find = None
            self.extend(find())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._look()
        return super().__iter__()

    def __len__(self) -> int:
        self._look()
        return super().__len__()

    def __getitem__(self, index: Any) -> Any:
        self._look()
        return super().__getitem__(index)
