"""What stands here for what is in the store: an optimizer, and gradients."""

from __future__ import annotations

from typing import Any

import torch

from bytesched.errors import PluginError
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.proxies.compiling import updating
from bytesched.plugins.proxies.pending import LazyGrad

__all__ = ["TakeOver", "absent"]


class TakeOver:
    """Stands where a deferred optimizer stands: its update is what came from the store."""

    def update(self, groups: list[tuple[dict[str, Any], list[Slot]]]) -> None:
        """Parameters get the values that lie in their buffers."""
        slots = [slot for _, members in groups for slot in members]
        with updating(), torch.no_grad():
            for slot in slots:
                slot.alias.copy_(slot.view)


def absent(slot: Slot) -> LazyGrad:
    """A gradient of which only shape and dtype are here; to use it is a PluginError."""
    parameter = slot.parameter
    nothing = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    grad = nothing.as_subclass(LazyGrad)

    def refuse() -> None:
        raise PluginError(
            f"the gradient of {slot.name!r} is in the store, which updates: it cannot be read, "
            "clipped or changed here; let the workers update (a store without an optimizer)"
        )

    grad.settle = refuse
    grad.is_taken = lambda: False
    return grad
