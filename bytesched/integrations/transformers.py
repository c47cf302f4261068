"""Transformers: a callback that schedules what a `Trainer` under torchrun trains."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from bytesched.errors import PluginError
from bytesched.integrations.training import Training

__all__ = ["SchedulingCallback"]


class SchedulingCallback(Training, TrainerCallback):  # type: ignore[misc]
    """`Trainer(..., callbacks=[SchedulingCallback()])`.

    The optimizer is wrapped when the training begins, after a checkpoint was restored, and is
    itself again when it has ended. A run on one process stays as it was. The keywords are the
    fields of `bytesched.Config`. Training raises `PluginError` where the trainer uses another
    wrapper than DDP.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer, on every rank."""
        if args.world_size > 1:
            self._begin([kwargs["optimizer"]], _ddp_around(kwargs["model"]))


def _ddp_around(model: Any) -> Any:
    """What the trainer has made of ``model``, which is all that it shows to callbacks."""
    from torch.nn.parallel import DistributedDataParallel

    from bytesched.plugins.script.owners import compiled_around, owners_of, parameter_ids

    for owner in owners_of(parameter_ids(model)):
        if isinstance(owner, DistributedDataParallel):
            return next(iter(compiled_around(owner)), owner)
    raise PluginError(f"no DistributedDataParallel is around this {type(model).__name__}")
