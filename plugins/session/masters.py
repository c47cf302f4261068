"""Parameters that travel rounded: whoever updates them has them in full, beside what all ranks see.

The full values are in the optimizer's state, so that a checkpoint has them, and a rank that asks.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.optimizer.state import GuardedState
from bytesched.plugins.proxies.pending import plain

__all__ = ["MASTER", "Master", "drop_masters", "give_back"]

#: in an entry of an optimizer's state
MASTER: Final = "bytesched_master"


class Master:
    """All digits of what this rank updates of a parameter, as a parameter that is updated.

    Args:
        own: the parameter, or a part of it, which has the rounded values.
    """

    def __init__(self, slot: Slot, own: Any, dtype: torch.dtype) -> None:
        self.parameter = slot.parameter
        self._own = own
        self._dtype = dtype
        self.alias = nn.Parameter(torch.empty_like(own.view), slot.parameter.requires_grad)
        self.alias.grad = own.view

    @torch.no_grad()
    def take(self, state: GuardedState) -> None:
        """An update follows: what the script has written to the parameter since the last counts."""
        memory, seen = self.alias.detach(), self._own.alias.detach()
        master = (dict.get(state, self.parameter) or {}).get(MASTER)
        memory.copy_(seen if master is None else _current(master, seen, self._dtype))

    @torch.no_grad()
    def give(self, state: GuardedState) -> None:
        """It was updated: the parameter gets its values, rounded."""
        memory = self.alias.detach()
        self._own.alias.detach().copy_(memory.to(self._dtype))
        state.raw(self.parameter)[MASTER] = memory

    def realias(self) -> None:
        """The parameter got other memory."""
        self._own.realias()

    def grad_from_parameter(self) -> None:
        """Its gradient is what the script has as that of the parameter, until `grad_from_arena`."""
        if isinstance(self._own, Slot):
            assert self.parameter.grad is not None
            self.alias.grad = plain(self.parameter.grad).detach()
        else:
            self._own.grad_from_parameter()
            self.alias.grad = self._own.alias.grad

    def grad_from_arena(self) -> None:
        """Its gradient is what was summed."""
        self.alias.grad = self._own.view

    def __repr__(self) -> str:
        return f"<Master of {self._own!r} in {self._dtype}>"


@torch.no_grad()
def give_back(entry: dict[str, Any], parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """The parameter gets all digits back, where nobody has written to it."""
    if (master := entry.get(MASTER)) is not None:
        parameter.copy_(_current(master, parameter.detach(), dtype))


def drop_masters(state: dict[Any, Any]) -> None:
    """Nobody asks for them any more."""
    for entry in dict.values(state):
        entry.pop(MASTER, None)


def _current(master: torch.Tensor, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``master``, but ``seen`` where that is not what ``master`` was rounded to."""
    return torch.where(master.to(dtype).to(seen.dtype) == seen, master, seen)
