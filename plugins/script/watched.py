"""A model of an unchanged script: when it is wrapped, with which optimizers, or why not."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, Protocol
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bytesched.config import Config
from bytesched.errors import BytesschedError, in_one_line
from bytesched.log import show

from .. import wrap_found
from ..agree import settings
from ..left import leave
from ..proxies.hooks import StayingHook
from ..registry import Wrapped, is_wrapped, sessions, unwrap, why_wrapped
from ..update.surroundings import has_modes
from .owners import parameter_ids

log = logging.getLogger("bytesched")

#: calls of step() in which a forward pass must have been seen; Horovod makes two of one
_PATIENCE: Final = 4


class Announced(Protocol):
    """What this rank has announced to the others."""

    @property
    def is_first(self) -> bool:
        """Whether it is for this rank to log what comes of it."""

    def objection(self) -> str:
        """Why the ranks do not wrap together, the same on all of them; empty if they do.

        To be called once the ranks have done something together since.
        """

    def withdraw(self, why: str) -> None:
        """This rank does not wrap after all."""


@dataclass(frozen=True)
class _Wrapped:
    """An optimizer that was wrapped, which may be gone, unlike its session."""

    optimizer: ref[torch.optim.Optimizer]
    module: ref[nn.Module]
    #: the ids of what it updates
    parameters: set[int]


class _Trigger(StayingHook):
    """A forward pre-hook that is not part of what is compiled."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call(module, args)


class Watched(ABC):
    """A model whose gradients are reduced, from its making to the moment of the wrap.

    The moment is a forward pass under grad, once model and optimizer are known and all ranks have
    announced that they are about to wrap. A rank announces that, and lets the ranks do something
    together: whoever was to announce anything at the same point has done so by the end of that.
    """

    #: what `_clock` counts
    ticks: str

    def __init__(self, name: str, kind: str, rank: int) -> None:
        self.name = name
        #: what all ranks call it alike
        self.kind = kind
        #: of this process, for the log alone
        self.rank = rank
        self.is_closed = False
        self._is_decided = False
        self._triggers: list[RemovableHandle] = []
        #: calls of step() since the triggers were set, by id of the optimizer
        self._steps: Counter[int] = Counter()
        #: the announcement of this rank, and the clock then
        self._announced: tuple[Announced, int] | None = None
        #: optimizers that are wrapped, left alone, or nothing to do with this model
        self._settled: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._wrapped: list[_Wrapped] = []

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

    @abstractmethod
    def _announce(self, statements: list[str]) -> Announced | None:
        """Announces them to the other ranks; None where these are known to do the same."""

    @abstractmethod
    def _clock(self) -> int:
        """Counts what the ranks do together, each time that they do."""

    def _counts(self) -> bool:
        """Whether the step that begins is one of training."""
        return True

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
        if not torch.is_grad_enabled() or torch._C._get_tracing_state() is not None or has_modes():
            # One that is traced or counted is none to begin with.
            return
        try:
            if not self._is_agreed():
                return
        except Exception as error:
            log.debug("%s: the ranks did not agree", self.name, exc_info=True)
            self.close()
            self._say(in_one_line(error))
            return
        self._disarm()
        self._is_decided = True
        already = set(module._forward_pre_hooks)
        for optimizer in self._optimizers():
            self._settled.add(optimizer)
            self._wrap(optimizer, module)
        # This call has collected the hooks of the module already, and is the first that counts.
        for key, hook in list(module._forward_pre_hooks.items()):
            if key not in already:
                hook(module, args)

    def _is_agreed(self) -> bool:
        """Whether all ranks wrap in this forward pass."""
        if self._announced is None:
            if why := self._why_not():
                self._leave(why)
                return False
            announced = self._announce(self._intent())
            if announced is None:
                return True
            self._announced = announced, self._clock()
            self._steps = Counter(dict.fromkeys(self._steps, 1))
            return False
        announced, clock = self._announced
        if clock == self._clock():
            return False
        self._announced = None
        if why := announced.objection():
            self.close()
            self._say(why, logging.WARNING if announced.is_first else logging.DEBUG)
        return not why

    def _intent(self) -> list[str]:
        """What has to be the same on all ranks, a line for each."""
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers())
        return [
            f"{self.kind} after {self._clock()} {self.ticks}",
            f"optimizer {optimizers}",
            *settings(Config.load()),
        ]

    def _wrap(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        if is_wrapped(optimizer):
            if not any(session.root is module for session in sessions(optimizer)):
                self._say(why_wrapped(optimizer, module))
            return
        try:
            wrap_found(optimizer, module)
        except Exception as error:
            known = isinstance(error, BytesschedError)
            self._say(str(error) if known else in_one_line(error))
            log.debug("%s could not be wrapped", self.name, exc_info=error)
        if is_wrapped(optimizer):
            self._wrapped.append(_Wrapped(ref(optimizer), ref(module), parameter_ids(optimizer)))
            log.info("%s: wrapped its optimizer, %s", self.name, type(optimizer).__name__)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """``step()`` of ``optimizer`` begins."""
        if optimizer in self._settled:
            return
        if not self._concerns(optimizer):
            self._settled.add(optimizer)
        elif not self._counts():
            return
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
                self._withdraw("another optimizer has stepped")
                steps = self._steps.copy()
                self.arm()
                self._steps = steps
            self._steps[id(optimizer)] += 1

    def give_back(self, parameters: set[int]) -> None:
        """Unwraps optimizers of any of ``parameters``, for which the script has something new."""
        if not any(parameters & wrapped.parameters for wrapped in self._wrapped):
            return
        for wrapped in self._wrapped:
            if (module := wrapped.module()) is not None:
                unwrap(module)
            optimizer = wrapped.optimizer()
            if optimizer is not None and not parameters & wrapped.parameters:
                # It is to be wrapped again, as its session is gone as well.
                self._settled.discard(optimizer)
        self._wrapped.clear()

    def _sessions(self) -> list[Wrapped]:
        """Those of this model, by optimizers that were wrapped before."""
        modules = {id(module): module for w in self._wrapped if (module := w.module()) is not None}
        return [session for module in modules.values() for session in sessions(module)]

    def close(self) -> None:
        """Nothing is decided about this model any more."""
        self._disarm()
        self.is_closed = True

    def say_if_undecided(self) -> None:
        """To be called when the script has ended."""
        if self.is_closed or self._is_decided:
            return
        if self._announced is not None:
            self._say("the script ended before the ranks had done anything together again")
        elif self._steps:
            self._say("no forward pass was seen after the first step() over its parameters")
        else:
            self._say("no step() of an optimizer over its parameters was seen")

    def _leave(self, why: str) -> None:
        if self._announced is None:
            self._announce([f"{self.kind} is left as it was: {why}"])
        self._withdraw(why)
        self.close()
        self._say(why)

    def _withdraw(self, why: str) -> None:
        if self._announced is not None:
            announced, _ = self._announced
            self._announced = None
            announced.withdraw(why)

    def _say(self, why: str, level: int = logging.INFO) -> None:
        say(self.name, why, self.rank, level)


def say(name: str, why: str, rank: int, level: int = logging.INFO) -> None:
    """Says once, on rank 0, why what has this name is left as it was."""
    show(Config.load().log_level, rank)
    leave(name, why, level)
