"""A model of an unchanged script: when it is wrapped, with which optimizers, or why not."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Final
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from bytesched.config import Config
from bytesched.errors import BytesschedError
from bytesched.log import show
from bytesched.plugins import wrap_found
from bytesched.plugins.proxies.hooks import StayingHook
from bytesched.plugins.registry import is_wrapped, unwrap
from bytesched.plugins.script.owners import compiled_around, owners_of, parameter_ids

__all__ = ["Watched", "WatchedDdp", "WatchedHorovod"]

log = logging.getLogger("bytesched")

#: calls of step() in which a forward pass must have been seen; Horovod makes two of one
_PATIENCE: Final = 4

_said: set[str] = set()


class _Trigger(StayingHook):
    """A forward pre-hook that is not part of what is compiled."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call(module, args)


class Watched(ABC):
    """A model whose gradients are reduced, from its making to the moment of the wrap.

    The moment is a forward pass under grad, once model and optimizer are known.
    """

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        #: of this process, for the log alone
        self.rank = rank
        self.is_closed = False
        self._is_decided = False
        self._triggers: list[RemovableHandle] = []
        #: calls of step() since the triggers were set, by id of the optimizer
        self._steps: Counter[int] = Counter()
        #: optimizers that are wrapped, left alone, or nothing to do with this model
        self._settled: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._wrapped: WeakSet[torch.optim.Optimizer] = WeakSet()

    @abstractmethod
    def parameters(self) -> set[int]:
        """The ids of its parameters."""

    @abstractmethod
    def is_about(self, optimizer: torch.optim.Optimizer, module: object) -> bool:
        """Whether ``wrap(optimizer, module)``, called by the script, is about this model."""

    @abstractmethod
    def _modules(self) -> list[nn.Module]:
        """Those whose call may be the forward pass; it is the outermost that is called."""

    @abstractmethod
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Those to be wrapped."""

    @abstractmethod
    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` updates this model."""

    def _why_not(self) -> str:
        """Why it is left as it is, where ``wrap`` does not log that once itself; else empty."""
        return ""

    def arm(self) -> None:
        """The next forward pass decides."""
        self._disarm()
        trigger = _Trigger(self._called)
        self._triggers = [
            m.register_forward_pre_hook(trigger, prepend=True) for m in self._modules()
        ]

    def _disarm(self) -> None:
        for handle in self._triggers:
            handle.remove()
        self._triggers = []
        self._steps.clear()

    def _called(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or _in_a_mode():
            return
        self._disarm()
        if why := self._why_not():
            self._leave(why)
            return
        self._is_decided = True
        already = set(module._forward_pre_hooks)
        for optimizer in self._optimizers():
            self._settled.add(optimizer)
            self._wrap(optimizer, module)
        # This call has collected the hooks of the module already, and is the first that counts.
        for key, hook in list(module._forward_pre_hooks.items()):
            if key not in already:
                hook(module, args)

    def _wrap(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        if is_wrapped(optimizer):
            return
        try:
            wrap_found(optimizer, module)
        except Exception as error:
            known = isinstance(error, BytesschedError)
            self._say(str(error) if known else f"{type(error).__name__}: {error}")
            log.debug("%s could not be wrapped", self.name, exc_info=error)
        if is_wrapped(optimizer):
            self._wrapped.add(optimizer)
            log.info("%s: wrapped its optimizer, %s", self.name, type(optimizer).__name__)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """``step()`` of ``optimizer`` begins."""
        if optimizer in self._settled:
            return
        if not self._concerns(optimizer):
            self._settled.add(optimizer)
        elif torch._C._current_graph_task_id() != -1:
            self._leave("its optimizer steps inside the backward pass")
        elif self._steps[id(optimizer)] == _PATIENCE:
            self._leave(
                "its forward pass is never seen: nothing calls it outside compiled code"
                if self._triggers
                else "no module contains all of its parameters"
            )
        else:
            if not self._steps[id(optimizer)]:
                self.give_back(parameter_ids(optimizer))
                steps = self._steps.copy()
                self.arm()
                self._steps = steps
            self._steps[id(optimizer)] += 1

    def give_back(self, parameters: set[int]) -> None:
        """Unwraps optimizers of any of ``parameters``, for which the script has something new."""
        held = WeakSet(o for o in self._wrapped if parameters & parameter_ids(o))
        if held:
            for optimizer in held:
                unwrap(optimizer)
            # The others of the same session are to be wrapped again.
            self._settled -= self._wrapped - held
            self._wrapped.clear()

    def close(self) -> None:
        """Nothing is decided about this model any more."""
        self._disarm()
        self.is_closed = True

    def say_if_undecided(self) -> None:
        """To be called when the script has ended."""
        if self.is_closed or self._is_decided:
            return
        if self._steps:
            self._say("no forward pass was seen after the first step() over its parameters")
        else:
            self._say("no step() of an optimizer over its parameters was seen")

    def _leave(self, why: str) -> None:
        self.close()
        self._say(why)

    def _say(self, why: str) -> None:
        """Says once, on rank 0, why the model is left as it was."""
        if why not in _said:
            _said.add(why)
            show(Config.load().log_level, self.rank)
            log.info("%s: left as it was: %s", self.name, why)


class WatchedDdp(Watched):
    """A DistributedDataParallel; its optimizers are those that step over its parameters.

    So its first iteration is plain. That an optimizer exists means little: it may be a remnant, or
    inside another one, or have its ``step()`` compiled, which rounds differently.
    """

    def __init__(self, ddp: Any, module: nn.Module) -> None:
        name = f"DistributedDataParallel of {type(module).__name__}"
        super().__init__(name, dist.get_rank() if dist.is_initialized() else 0)
        self.ddp = ref(ddp)
        #: optimizers that have stepped, in the order of their first step
        self._stepped: list[ref[torch.optim.Optimizer]] = []

    def parameters(self) -> set[int]:
        ddp = self.ddp()
        return parameter_ids(ddp) if ddp is not None else set()

    def is_about(self, optimizer: torch.optim.Optimizer, module: object) -> bool:
        ddp = self.ddp()
        return ddp is not None and getattr(module, "_orig_mod", module) is ddp

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Watched.before_step`."""
        known = optimizer in self._settled or any(o() is optimizer for o in self._stepped)
        if not known and self._concerns(optimizer):
            self._stepped.append(ref(optimizer))
        super().before_step(optimizer)

    def _modules(self) -> list[nn.Module]:
        ddp = self.ddp()
        return [] if ddp is None else [ddp, *compiled_around(ddp)]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        stepped = [optimizer() for optimizer in self._stepped]
        return [o for o in stepped if o is not None and o not in self._settled]

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        return bool(parameter_ids(optimizer) & self.parameters())

    def _why_not(self) -> str:
        ddp = self.ddp()
        join = getattr(ddp, "_join_config", None)
        if join is not None and join.enable:
            return "join() shadows DDP's own all-reduces, and no others"
        return "there is one rank" if ddp is not None and ddp.process_group.size() == 1 else ""


class WatchedHorovod(Watched):
    """What an optimizer of Horovod's updates; its model is the module around all of that.

    It is wrapped after its first ``step()``: before, a rank may call it alone, and a wrap is
    collective. In an elastic run it is wrapped in its first forward pass, as a rank that joins
    later has to do what the others do.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        import horovod.torch as hvd

        super().__init__(f"Horovod's {type(optimizer).__name__}", hvd.rank())
        self._optimizer = ref(optimizer)

    def parameters(self) -> set[int]:
        optimizer = self._optimizer()
        return parameter_ids(optimizer) if optimizer is not None else set()

    def is_about(self, optimizer: torch.optim.Optimizer, module: object) -> bool:
        return self._concerns(optimizer)

    def _modules(self) -> list[nn.Module]:
        return owners_of(self.parameters())

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        optimizer = self._optimizer()
        return [] if optimizer is None else [optimizer]

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer is self._optimizer()


def _in_a_mode() -> bool:
    """Whether this forward pass is traced or counted, and so none to begin with."""
    modes = _get_current_function_mode_stack()
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or any(not isinstance(mode, DeviceContext) for mode in modes)
    )
