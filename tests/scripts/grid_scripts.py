"""Training in each cell of the grid."""

from __future__ import annotations

import hashlib
from typing import Any

from levels_scripts import on_named_hosts
from restless import ScriptedJob
from torch import nn
from torch.optim import Optimizer
from training import SMALL, Job, compare

from bytesched.grid import Cell
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


def in_cell(
    cell: tuple[str, str, str],
    hosts: list[int],
    address: tuple[str, str],
    args: tuple[Any, ...],
    rtol: float,
) -> Any:
    """`training.compare` of plain DDP and of ``cell``, where hosts have so many ranks."""
    carried, levels, sizes = Cell(*cell)
    options: dict[str, Any] = dict(SMALL)
    options["shard"] = carried == "sharded"
    options["split"] = {"whole": "off", "split": "on", "sharded": "auto"}[carried]
    options["hierarchy"] = "on" if levels == "two levels" else "off"
    if sizes == "tuned":
        options["turns"] = TURNS
    with on_named_hosts(hosts):
        return compare(address, args, options, rtol, CellJob)
