"""The deferred update: the user's own optimizer, run on the parameters that are ready.

No optimizer is re-implemented. ``step()`` takes a snapshot of the hyper-parameters; when the
gradients of a bundle are there, the raw ``step`` of the optimizer's class runs on a copy of the
optimizer whose groups hold just these parameters, under that snapshot.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.proxies.compiling import updating

__all__ = ["Deferred", "GuardedState", "snapshot", "why_not_deferred"]

#: Optimizers whose update of one parameter depends on that parameter alone. Exact classes: a
#: subclass may do anything.
SEPARABLE: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
    if hasattr(torch.optim, name)
)


def why_not_deferred(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    """Why ``optimizer``, updated by ``kind``, cannot be bundle by bundle; empty if it can."""
    if kind not in SEPARABLE:
        return f"{kind.__name__} is not known to update each parameter on its own"
    if not hasattr(kind.step, "__wrapped__") and not hasattr(kind.step, "hooked"):
        return f"{kind.__name__}.step has been replaced"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True"
    return ""


class GuardedState(defaultdict[Any, Any]):
    """``optimizer.state``; any use of it from outside applies what is outstanding first."""

    def __init__(self, content: Any, settle: Callable[[], None]) -> None:
        super().__init__(dict, content)
        self._settle = settle

    def raw(self, key: Any) -> Any:
        """The entry of ``key`` as it is now, made if missing, as ``self[key]`` makes it."""
        entry = dict.get(self, key)
        if entry is None:
            entry = {}
            dict.__setitem__(self, key, entry)
        return entry

    def plain(self) -> defaultdict[Any, Any]:
        """The same entries in an ordinary dictionary."""
        return defaultdict(dict, self.items())

    def __copy__(self) -> Any:
        return self.plain()

    def copy(self) -> Any:
        """The same entries in an ordinary dictionary."""
        return self.plain()

    def __or__(self, other: Any) -> Any:
        return self.plain() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.plain()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain(), memo)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.items()))


def _settled(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def call(self: GuardedState, *args: Any) -> Any:
        self._settle()
        return method(self, *args)

    return call


_USES = """
    __contains__ __delitem__ __eq__ __getitem__ __iter__ __len__ __ne__ __repr__ __setitem__
    clear get items keys pop popitem setdefault update values
"""

for _name in _USES.split():
    setattr(GuardedState, _name, _settled(_name))


class _AliasedState(dict[Any, Any]):
    """What a copy of the optimizer sees as its state: the entries of the real parameters."""

    def __init__(self, state: GuardedState, real: dict[nn.Parameter, nn.Parameter]) -> None:
        super().__init__()
        self._state = state
        self._real = real

    def __missing__(self, alias: Any) -> Any:
        return self._state.raw(self._real.get(alias, alias))


class Deferred:
    """One optimizer, and a copy of it that updates bundles.

    Args:
        kind: the class whose ``step()`` does the update: the optimizer's own, or one beneath it
            whose ``step()`` the optimizer's own calls.
        settle: applies what is outstanding.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        settle: Callable[[], None],
        *,
        cross: bool,
    ) -> None:
        self.optimizer = optimizer
        #: updates may be applied after ``step()`` has returned
        self.cross = cross
        #: of the step pre-hook
        self.hook_id = -1
        self._settle = settle
        #: parameter by its alias
        self._real: dict[nn.Parameter, nn.Parameter] = {}
        self._kind = kind
        own: Any = type(optimizer).step
        #: of the ``step()`` around that of ``kind``, if there is one
        self._outer_code = None if kind is type(optimizer) else inspect.unwrap(own).__code__
        step = kind.step
        # Around it torch runs the hooks of the user's step(); they have run already.
        self._raw_step: Callable[..., Any] = getattr(step, "__wrapped__", step)
        self.guard()

    def guard(self) -> None:
        """Guards ``optimizer.state``, again if somebody has replaced it."""
        state = self.optimizer.state
        if not isinstance(state, GuardedState):
            state = self.optimizer.state = GuardedState(state, self._settle)
        self._copies_state = _AliasedState(state, self._real)

    def unguard(self) -> None:
        """Gives the optimizer a plain state back, as it is: nothing is applied."""
        if isinstance(self.optimizer.state, GuardedState):
            self.optimizer.state = defaultdict(dict, dict.items(self.optimizer.state))

    def copy(self, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer with other groups, the same state, and no hooks."""
        copied: torch.optim.Optimizer = self._kind.__new__(self._kind)
        copied.__dict__.update(self.optimizer.__dict__)
        copied.state = self._copies_state  # type: ignore[assignment]
        copied.param_groups = param_groups
        copied._optimizer_step_pre_hooks = type(self.optimizer._optimizer_step_pre_hooks)()
        copied._optimizer_step_post_hooks = type(self.optimizer._optimizer_step_post_hooks)()
        return copied

    def is_outer(self) -> bool:
        """True in a hook of the outer of two nested ``step()`` calls, each of which has hooks."""
        if self._outer_code is None:
            return False
        # From here: the hook, torch's wrapper that runs the hooks, and who called ``step()``.
        return sys._getframe(3).f_code is not self._outer_code

    def parameter_ids(self) -> set[int]:
        """The ids of all its parameters."""
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    def know(self, slot: Slot) -> None:
        """``slot.alias`` stands for ``slot.parameter`` from now on."""
        self._real[slot.alias] = slot.parameter

    def update(self, groups: list[tuple[dict[str, Any], list[Slot]]]) -> None:
        """Runs the real update of ``slots`` under the hyper-parameters of each group."""
        copied = self.copy(
            [{**snapshot, "params": [s.alias for s in slots]} for snapshot, slots in groups]
        )
        with updating():
            self._raw_step(copied)


def snapshot(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of ``group`` as they are now; tensors are cloned."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
