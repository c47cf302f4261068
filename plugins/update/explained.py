"""What is known of an optimizer, and what a trial says of one that nobody knows."""

from __future__ import annotations

import torch

from bytesched.errors import PluginError

from .delegation import stepping_optimizer
from .probe import TRIED_STEPS, why_not_separable
from .separable import is_known, why_not_deferred

__all__ = ["explain_optimizer"]


def explain_optimizer(
    optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer] | None = None
) -> str:
    """See :func:`bytesched.explain_optimizer`.

    Args:
        kind: the class whose ``step()`` does the update; that of the optimizer if None.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PluginError(f"{type(optimizer).__name__} is not a torch optimizer")
    stepping = stepping_optimizer(optimizer)
    kind = kind or type(stepping)
    why = why_not_deferred(stepping, kind)
    if not why:
        return f"{kind.__name__} updates each parameter on its own: its updates may come later"
    return why if is_known(kind) else f"{why}. {_tried(stepping, kind)}"


def _tried(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> str:
    if why := why_not_separable(optimizer, kind):
        return f"A trial on small copies says no: {why}"
    return (
        f"A trial on small copies found nothing against it in {TRIED_STEPS} steps, which proves "
        f"nothing: read the source of {kind.__name__} before you vouch for it"
    )
