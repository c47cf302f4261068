"""Training scripts run twice on every Horovod rank: plain, and with bytesched on top."""

from __future__ import annotations

import json
from typing import Any

import horovod.torch as hvd
from restless import RestlessJob, ScriptedJob
from torch import nn
from torch.optim import Optimizer
from training import Job, compare


class Root(nn.Module):
    """Holds a model as DDP does, so that scripts written for DDP run; does nothing else."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


class HorovodJob(Job):
    #: Scripts do not import Horovod, so that tests name them where it is not installed.
    hvd = hvd

    @staticmethod
    def own_rank() -> int:
        return hvd.rank()  # type: ignore[no-any-return]

    @staticmethod
    def barrier() -> None:
        hvd.barrier()

    def ddp(self, module: nn.Module, **arguments: Any) -> Any:
        return Root(module)

    def started(self, optimizer: Optimizer, model: nn.Module) -> Any:
        return self.distributed(optimizer, model)

    def distributed(
        self, optimizer: Optimizer, model: nn.Module, names: Any = None, **horovod: Any
    ) -> Any:
        """Horovod's optimizer in place of `optimizer`; with ops and compressors by name."""
        for name, place in (("op", hvd), ("compression", hvd.Compression)):
            if isinstance(given := horovod.get(name), str):
                horovod[name] = getattr(place, given)
        names = model.named_parameters() if names is None else names
        return hvd.DistributedOptimizer(optimizer, named_parameters=names, **horovod)

    def wrap(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        names: Any = None,
        horovod: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Any:
        """Horovod's optimizer in place of `optimizer`, if that is not it, and wrapped."""
        if not hasattr(optimizer, "skip_synchronize"):
            optimizer = self.distributed(optimizer, model, names, **horovod or {})
        return super().wrap(optimizer, model, **fields)


class RestlessHorovodJob(RestlessJob, HorovodJob):
    """One whose wrapped run is tuned all the time."""


class ScriptedHorovodJob(ScriptedJob, HorovodJob):
    """One whose wrapped run passes through given settings."""


def compare_over_mpi(cases: dict[str, tuple[tuple[str, str], list[Any]]]) -> None:
    """Prints of each script where its wrapped run differs from a plain one, and how it ended."""
    assert hvd.mpi_enabled()
    for name, (script, args) in cases.items():
        found, stats = compare(script, tuple(args), kind=HorovodJob)
        print(json.dumps({"case": name, "found": found[:20], "mode": stats["mode"]}), flush=True)
