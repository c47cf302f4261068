"""Hooks of modules: a call waits for the updates of what it uses first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bytesched.observe import Observers

from ..proxies.first_use import FirstUse
from ..proxies.hooks import StayingForwardHook, StayingHook, gate
from .bundles import Bundle, BundleState, Slot
from .updates import Updates


class Gates:
    """In front of the modules of one model, once its first forward passes have shown which.

    Args:
        root: whose call is a forward pass; not kept alive.
        slots: all of its parameters, in registration order.
        observers: they are told of the ends of forward passes.
        begins: the root is about to be called, and may be trained on.
        ends: it has returned or raised.
        compiled: compiled code contains hooks of ours, so that nothing can wait in front of it.
    """

    def __init__(
        self,
        root: nn.Module,
        slots: Sequence[Slot],
        updates: Updates,
        observers: Observers,
        *,
        begins: Callable[[nn.Module], None],
        ends: Callable[[], None],
        compiled: Callable[[], None],
    ) -> None:
        self._slots = slots
        self._updates = updates
        self._begins, self._ends, self._compiled = begins, ends, compiled
        self._observers = observers
        #: until it has learned
        self._first_use: FirstUse | None = None
        before = StayingHook(self.begin, self._inside_compiled)
        #: what takes off the hook of the root in front of its forward pass, that behind it, and
        #: those of gates
        self._unhook_begin = root.register_forward_pre_hook(before, prepend=True).remove
        self._unhook_end: Callable[[], None] = _nothing
        self._hooks: list[Callable[[], None]] = []
        self.learn(root)

    def learn(self, root: nn.Module) -> None:
        """The next forward passes show where gates belong; there are none yet."""
        after = StayingForwardHook(self._end)
        self._unhook_end = root.register_forward_hook(after, always_call=True).remove
        self._first_use = FirstUse(root, [slot.parameter for slot in self._slots])

    def begin(self, module: nn.Module, args: Any) -> None:
        """``module``, the root, is about to be called."""
        if torch.is_grad_enabled():
            self._begins(module)
            if self._first_use is not None:
                self._first_use.begin()
        elif not module.training:
            self._updates.apply_all(type(module).__name__)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._first_use is not None:
            self._first_use.end()
        if torch.is_grad_enabled():
            self._ends()

    def are_learned(self) -> bool:
        """Puts gates and bundles where forward passes have shown them; whether it did so now."""
        first_use, self._first_use = self._first_use, None
        if first_use is None:
            return False
        first_use.close()
        if not self._observers:
            # Without bytesched its pickle could not be loaded.
            self._unhook_end()
        self._updates.bundle(first_use.units())
        slots = {id(slot.parameter): slot for slot in self._slots}
        for module, name, parameters in first_use.gates():
            behind = {slots[id(parameter)].bundle: None for parameter in parameters}
            bundles = sorted(behind, key=lambda bundle: bundle.number)
            self._hooks.append(gate(module, self._gate(bundles, name), self._inside_compiled))
        return True

    def _gate(self, bundles: Sequence[Bundle], name: str) -> Callable[[nn.Module], None]:
        """What a call of a module does first: on the critical path of the forward pass."""
        apply, free = self._updates.apply, BundleState.FREE

        def wait(module: nn.Module) -> None:
            for bundle in bundles:
                if bundle.state is not free:
                    apply(bundle, name)
            if not (torch.is_grad_enabled() or module.training):
                # Evaluation may take fast paths that look at the types of all parameters at once.
                self._updates.apply_all(name)

        return wait

    def _inside_compiled(self) -> None:
        # Without hooks it is compiled once more, and as a whole.
        self.close()
        self._compiled()

    def rest(self) -> None:
        """Takes all gates off; forward passes are still told of."""
        if self._first_use is not None:
            self._first_use.close()
            self._first_use = None
        self._unhook_end()
        for unhook in self._hooks:
            unhook()
        self._hooks.clear()

    def close(self) -> None:
        """Takes all hooks off."""
        self.rest()
        self._unhook_begin()


def _nothing() -> None:
    """There is nothing to take off."""
