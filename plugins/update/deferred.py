"""The deferred update: the user's own optimizer, run on the parameters that are ready.

No optimizer is re-implemented. ``step()`` takes a snapshot of the hyper-parameters; when the
gradients of a bundle are there, the raw ``step`` of the optimizer's class runs on a copy of the
optimizer whose groups hold just these parameters, under that snapshot.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_, methodcaller
from types import MethodType
from typing import Any, Final, Protocol

import torch
from torch import nn

from ..proxies.compiling import updating
from .optimizer_state import AliasedState, GuardedState
from .separable import BESIDE, HOOKS, is_hooked, optimizer_classes, why_not_deferred
from .surroundings import Surroundings, snapshot

log = logging.getLogger("bytesched")

#: attributes through which an optimizer refers to itself: hooks, and Horovod's nodes of autograd,
#: which have hooks
_HOOKED: Final = frozenset({*HOOKS, "_grad_accs"})


#: of a mapping, without a call of Python
_VALUES: Final = methodcaller("values")


def _raw_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """``kind.step`` without the hooks that torch runs around it."""
    step: Any = kind.step
    raw: Callable[..., Any] = step.__wrapped__ if is_hooked(kind) else step
    return raw


class _Code:
    """What an update by ``kind`` may call, as it is now: a change of it is seen in each step.

    Args:
        optimizer: not kept alive, nor is what it alone has.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> None:
        classes = optimizer_classes(kind)
        # A script, in which some classes are, gives its names other values all the time.
        names = {each.__module__ for each in classes} - {"__main__"}
        modules = [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]
        self._places = [*map(vars, classes), *modules]
        self._own: list[int] = []
        self._shared: list[Any] = []
        self.has_changed(optimizer)

    def has_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is not what it was when this was last called."""
        own, shared = self._own, self._shared
        mine = vars(optimizer).items()
        self._own = [id(value) for name, value in mine if callable(value) and name not in BESIDE]
        self._shared = [*chain.from_iterable(map(_VALUES, self._places))]
        is_same = own == self._own and len(shared) == len(self._shared)
        return not (is_same and all(map(is_, shared, self._shared)))


class Aliased(Protocol):
    """A parameter or a part of one, and what stands for it in an update."""

    @property
    def parameter(self) -> nn.Parameter:
        """The one whose entry of the state is used."""

    @property
    def alias(self) -> nn.Parameter:
        """With the memory that is updated, and its gradient."""


class Deferred:
    """One optimizer, and a copy of it that updates bundles.

    Args:
        optimizer: not kept alive: one that the user has let go of has nothing to defer.
        kind: the class whose ``step()`` does the update: the optimizer's own, or one beneath it
            whose ``step()`` the optimizer's own calls.
        synchronize: applies what is outstanding.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        synchronize: Callable[[], None],
        *,
        cross: bool,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        #: updates may be applied after ``step()`` has returned
        self.cross = cross
        #: whose ``step()`` does the update
        self.kind = kind
        #: of the step pre-hook
        self.hook_id = -1
        self._synchronize = synchronize
        #: the groups of a copy, as they were before it was stepped
        self._before: list[dict[str, Any]] = []
        #: parameter by its alias
        self._real: dict[nn.Parameter, nn.Parameter] = {}
        #: its alias, by the id of the parameter
        self._aliases: dict[int, nn.Parameter] = {}
        self._ids: set[int] = set()
        self.parameter_ids()
        own: Any = type(optimizer).step
        #: of the ``step()`` around that of ``kind``, if there is one
        self._outer_code = None if kind is type(optimizer) else inspect.unwrap(own).__code__
        # Around it torch runs the hooks of the user's step(); they have run already.
        self._raw_step = _raw_step(kind)
        parameters = list(inspect.signature(self._raw_step).parameters)
        self._takes_closure = parameters[1:2] == ["closure"]
        self._code = _Code(optimizer, kind)
        #: why it is not what it was
        self._replaced = ""
        #: of the state while it is not guarded
        self._known: dict[int, weakref.ref[torch.Tensor]] | None = None
        self.guard()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer, in a call of its own or as long as a job keeps it."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def is_alive(self) -> bool:
        """Whether anything refers to the optimizer."""
        return self._optimizer() is not None

    def guard(self) -> None:
        """Guards ``optimizer.state``, again if it was replaced.

        Raises PluginError if other ranks have kept entries of it.
        """
        optimizer = self.optimizer
        state = optimizer.state
        if isinstance(state, GuardedState) and state.is_abandoned:
            state = state.plain()
        if not isinstance(state, GuardedState):
            state = optimizer.state = GuardedState(state, self._synchronize, self._known)
            self._known = None
        self._copies_state: AliasedState | None = AliasedState(state, self._real)

    def loaded(self, *, is_guarded: bool) -> None:
        """The optimizer has another state: what others have of it is known."""
        self._known = None
        self.guard()
        if not is_guarded:
            self.unguard()

    def unguard(self) -> None:
        """Gives the optimizer a plain state back, as it is: nothing is applied.

        One of which other ranks have kept entries stays, as these are not empty.
        """
        state = self.optimizer.state if self.is_alive else None
        if isinstance(state, GuardedState) and not state.abandon():
            self._known = state.known
            # Who loads another state lets go of this one.
            self._copies_state = None
            self.optimizer.state = defaultdict(dict, dict.items(state))

    def why_replaced(self) -> str:
        """Why its updates cannot wait any more: it has other code; empty if it has not."""
        if self._code.has_changed(self.optimizer):
            is_same = _raw_step(self.kind) is self._raw_step
            why = f"{self.kind.__name__}.step has been replaced"
            why = why_not_deferred(self.optimizer, self.kind) if is_same else why
            if why and not self._replaced:
                log.warning(
                    "%s, after bytesched.wrap: step() waits for all gradients from now on; updates "
                    "that were owed then may have used it",
                    why,
                )
            self._replaced = why
        return self._replaced

    def why_kept(self) -> str:
        """Why its updates cannot wait, as the script has some of its state; empty if it has not."""
        state = self.optimizer.state
        is_kept = isinstance(state, GuardedState) and state.is_kept()
        return "the script has kept a part of optimizer.state" if is_kept else ""

    def arguments(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Callable[[], Any] | None, bool]:
        """The closure among the arguments of ``step()``, and whether there are others."""
        given = {**kwargs, **{str(number): value for number, value in enumerate(args)}}
        name = "0" if args and self._takes_closure else "closure"
        closure = given.get(name)
        if closure is None or callable(closure):
            given.pop(name, None)
        return (closure if callable(closure) else None), bool(given)

    def copy(
        self, param_groups: list[dict[str, Any]], attributes: dict[str, Any] | None = None
    ) -> torch.optim.Optimizer:
        """The optimizer with other groups, the same state, no hooks; ``attributes`` or its own."""
        copied: torch.optim.Optimizer = self.kind.__new__(self.kind)
        copied.__dict__.update(self.optimizer.__dict__ if attributes is None else attributes)
        copied.state = self._copies_state  # type: ignore[assignment]
        copied.param_groups = param_groups
        copied._optimizer_step_pre_hooks = OrderedDict()
        copied._optimizer_step_post_hooks = OrderedDict()
        return copied

    def steps(self, param_groups: list[dict[str, Any]]) -> None:
        """A copy with these groups is about to be stepped in place of the optimizer."""
        self._before = [{**group} for group in param_groups]

    def stepped(self, copied: torch.optim.Optimizer) -> None:
        """``copied`` was stepped in place of the optimizer: what it counts in its groups counts.

        What a hook of the script has changed in the optimizer's own groups since then stays.
        """
        groups = zip(self.optimizer.param_groups, self._before, copied.param_groups, strict=False)
        for group, before, after in groups:
            for name, value in after.items():
                if name != "params" and before.get(name, self) is not value:
                    group[name] = value

    def is_outer(self) -> bool:
        """True in a hook of the outer of two nested ``step()`` calls, each of which has hooks."""
        if self._outer_code is None:
            return False
        # From here: the hook, torch's wrapper that runs the hooks, and who called ``step()``.
        return sys._getframe(3).f_code is not self._outer_code

    def parameter_ids(self) -> set[int]:
        """The ids of all its parameters; of one that is gone, as they were when last asked for.

        When it goes is the collector's choice, and differs between ranks.
        """
        if self.is_alive:
            self._ids = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return self._ids

    def know(self, slot: Aliased) -> None:
        """``slot.alias`` stands for ``slot.parameter`` from now on."""
        key = id(slot.parameter)
        if (old := self._aliases.pop(key, None)) is not None:
            self._real.pop(old, None)
        self._aliases[key] = slot.alias
        self._real[slot.alias] = slot.parameter

    def now(self) -> Callable[[Sequence[tuple[dict[str, Any], Sequence[Aliased]]]], None]:
        """The real update as this thread would do it at this moment, for another to do later."""
        optimizer = self.optimizer
        attributes = {
            name: value
            for name, value in optimizer.__dict__.items()
            # An update that is owed keeps neither the optimizer alive nor what its hooks refer to.
            if name not in _HOOKED
            and not (isinstance(value, MethodType) and value.__self__ is optimizer)
        }
        surroundings = Surroundings.here()

        def update(groups: Sequence[tuple[dict[str, Any], Sequence[Aliased]]]) -> None:
            with surroundings.entered(), updating():
                now = [
                    {**snapshot(taken), "params": [slot.alias for slot in slots]}
                    for taken, slots in groups
                ]
                self._raw_step(self.copy(now, attributes))

        return update
