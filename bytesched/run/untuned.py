"""Says after a few steps that a script which is to be tuned has nothing to tune."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from typing import Any, Final

from bytesched.environment import rank_view

log = logging.getLogger("bytesched")

#: steps of one optimizer by which all that can be wrapped is wrapped: a wrap takes three or four
PATIENCE_STEPS: Final = 8


def watch_steps(optimizers: Any) -> None:
    """Count steps from now on, until something is wrapped or it is said that nothing is.

    Args:
        optimizers: the module ``torch.optim.optimizer``.
    """
    steps: Counter[int] = Counter()

    # The hook stays: torch is going through all hooks when one is called.
    is_over = False

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal is_over
        if is_over or sys.modules["torch"].compiler.is_compiling():
            return
        registry = sys.modules.get("bytesched.plugins.registry")
        if registry is not None and registry.sessions():
            is_over = True
            return
        steps[id(optimizer)] += 1
        if steps[id(optimizer)] >= PATIENCE_STEPS:
            is_over = True
            if _rank() == 0:
                name = type(optimizer).__name__
                log.warning(
                    "tune: nothing is tuned: after %d steps of %s, %s. The training goes on; "
                    "if you only want the tuning, end it",
                    PATIENCE_STEPS,
                    name,
                    _why(),
                )

    optimizers.register_optimizer_step_post_hook(stepped)


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return rank_view().rank


def _why() -> str:
    if "bytesched.plugins.script.watched" not in sys.modules:
        return (
            "the script has made neither a DistributedDataParallel nor an optimizer of Horovod's, "
            "and has not called bytesched.wrap"
        )
    reasons: list[str] = sys.modules["bytesched.plugins.left"].left()
    said = "; ".join(reasons)
    return said or "no optimizer that steps over its DistributedDataParallel is wrapped"
