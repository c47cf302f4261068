"""Lightning: a callback that schedules what a `Trainer` with the strategy "ddp" trains."""

from __future__ import annotations

import sys
from typing import Any

from bytesched.errors import PluginError
from bytesched.integrations.training import Training

# The same code has two names, and each trainer wants callbacks of its own.
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

__all__ = ["SchedulingCallback"]


class SchedulingCallback(Training, Callback):  # type: ignore[misc]
    """`Trainer(strategy="ddp", callbacks=[SchedulingCallback()])`.

    Optimizers are wrapped when the training starts, after a checkpoint was restored, and are
    themselves again when it has ended. A run on one process stays as it was. The keywords are the
    fields of `bytesched.Config`. Training raises `PluginError` with another strategy than DDP.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by the trainer, on every rank."""
        if trainer.world_size == 1:
            return
        from torch.nn.parallel import DistributedDataParallel

        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise PluginError(
                f"{type(trainer.strategy).__name__} trains a {type(model).__name__}: gradients are "
                'scheduled with strategy="ddp"'
            )
        self._begin(trainer.optimizers, model)
