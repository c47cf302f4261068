"""What really steps when an optimizer does: itself, or one that it delegates to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from bytesched.errors import PluginError

__all__ = ["HOOKS", "is_hooked", "raw_step", "stepping_optimizer"]

#: what ``Optimizer.__init__`` gives an instance for its hooks
HOOKS: Final = tuple(
    f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)


def _nothing() -> None:
    pass


#: of torch's wrapper around every ``step`` that runs hooks
_HOOKED_CODE: Final = torch.optim.Optimizer.profile_hook_step(_nothing).__code__


def is_hooked(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether ``kind.step`` is what runs the hooks of an optimizer, and nobody has replaced it."""
    return getattr(kind.step, "__code__", None) is _HOOKED_CODE


def raw_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """``kind.step`` without the hooks that torch runs around it."""
    step: Any = kind.step
    raw: Callable[..., Any] = step.__wrapped__ if is_hooked(kind) else step
    return raw


def stepping_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose hooks see every step over the parameters of ``optimizer``.

    A shell, as trainers put around an optimizer, has no hooks of its own, or does more than one
    step of the optimizer in it. Raises `PluginError` for one without an optimizer in it.
    """
    seen = {id(optimizer)}
    while (inside := _inside(optimizer)) is not None and id(inside) not in seen:
        optimizer = inside
        seen.add(id(optimizer))
    own = vars(optimizer)
    missing = [name for name in ("state", "param_groups", *HOOKS) if name not in own]
    if missing or not hasattr(type(optimizer).step, "hooked"):
        raise PluginError(
            f"{type(optimizer).__name__} never called Optimizer.__init__, and holds no optimizer "
            "over all of its parameters: wrap what it delegates to"
        )
    return optimizer


def _inside(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """An optimizer that is an attribute of ``optimizer``, over all of its parameters."""
    mine = _parameter_ids(optimizer)
    for value in vars(optimizer).values():
        # Not isinstance: it reads the class of proxies of all kinds.
        if issubclass(type(value), torch.optim.Optimizer) and mine <= _parameter_ids(value):
            return value  # type: ignore[no-any-return]
    return None


def _parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())
    return {id(parameter) for group in groups for parameter in group["params"]}
