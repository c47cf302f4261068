"""Training in each cell of the grid, and where rows are summed by collectives, as over NCCL."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from typing import Any
from unittest import mock

from levels_scripts import on_named_hosts
from restless import ScriptedJob
from torch import nn
from torch.optim import Optimizer
from training import SMALL, Job, compare

from bytesched.grid import Cell
from bytesched.plugins.c10d import carrying
from bytesched.tunable import Setting

#: what a tuner tries, with steps
TURNS = [
    (Setting(256, 512), 2),
    (Setting(96, 300), 2),
    (Setting(1000, 2000), 2),
    (Setting(512, 512), 1),
]


class CellJob(ScriptedJob):
    """A job that has a tuner if there are turns for it, and a digest of its weights."""

    def __init__(self, *, wrapped: bool, turns: Any = (), **fields: Any) -> None:
        if turns:
            super().__init__(wrapped=wrapped, turns=turns, **fields)
        else:
            Job.__init__(self, wrapped=wrapped, **fields)

    def record_state(self, model: nn.Module, *optimizers: Optimizer) -> None:
        super().record_state(model, *optimizers)
        digest = hashlib.sha256()
        for weight in model.state_dict().values():
            digest.update(weight.numpy().tobytes())
        self.stats["digest"] = digest.hexdigest()


def by_collectives(
    address: tuple[str, str], args: tuple[Any, ...], options: dict[str, Any], rtol: float
) -> Any:
    """`training.compare` where the two hops of a chunk are collectives, of Gloo here."""
    with mock.patch.object(carrying, "splits_by_collectives", return_value=True):
        return compare(address, args, options, rtol)


def in_cell(
    cell: tuple[str, str, str, str],
    hosts: list[int],
    address: tuple[str, str],
    args: tuple[Any, ...],
    rtol: float,
) -> Any:
    """`training.compare` of plain DDP and of ``cell``, where hosts have so many ranks."""
    carried, levels, sizes, wire = Cell(*cell)
    options: dict[str, Any] = dict(SMALL)
    options["shard"] = carried == "sharded"
    options["split"] = {"whole": "off", "split": "on", "sharded": "auto"}[carried]
    options["hierarchy"] = "on" if levels == "two levels" else "off"
    if sizes == "tuned":
        options["turns"] = TURNS
    with ExitStack() as patches:
        patches.enter_context(on_named_hosts(hosts))
        patches.enter_context(
            mock.patch.object(carrying, "splits_by_collectives", return_value=wire == "collectives")
        )
        return compare(address, args, options, rtol, CellJob)
