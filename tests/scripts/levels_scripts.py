"""Training by ranks that believe to share hosts, and in each cell of the grid."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from faults_runner import tell
from raised import raised
from restless import ScriptedJob
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from training import SMALL, STEPS, Job, adamw, compare, mlp, script, train

import bytesched
from bytesched.grid import Cell
from bytesched.tunable import Setting


def on_hosts(
    ranks: list[int],
    address: tuple[str, str],
    args: tuple[Any, ...],
    options: dict[str, Any],
    rtol: float,
) -> Any:
    """`training.compare` where the hosts have so many ``ranks``, in their order."""
    with on_named_hosts(ranks):
        return compare(address, args, options, rtol)


def refused(ranks: list[int]) -> str:
    """What `wrap` says of a hierarchy on such hosts."""
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with on_named_hosts(ranks):
        return raised(lambda: bytesched.wrap(optimizer, model, hierarchy="on"))


@script(adamw)
def trained(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer)


def exact(job: Job) -> None:
    """Sums of small whole numbers: without rounding, in whatever order."""
    model = job.ddp(nn.Linear(7, 5, bias=False))
    nn.init.zeros_(model.module.weight)
    optimizer = job.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model)
    for step in range(STEPS):
        batch = (job.inputs(step, 4, 7) * 3).round()
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    job.record_state(model, optimizer)


def rank_3_dies() -> None:
    """In the middle of training, between two rounds of its own."""
    with on_named_hosts([2, 2]):
        model = DistributedDataParallel(mlp())
        optimizer = bytesched.wrap(adamw(model), model, hierarchy="on", timeout_s=100.0)
        try:
            for step in range(8):
                if step == 4 and dist.get_rank() == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
            bytesched.flush()
        except bytesched.BytesschedError as error:
            tell(error=type(error).__name__, text=str(error))
            raise


def on_named_hosts(ranks: list[int]) -> Any:
    """Hosts that have so many ``ranks``, in their order."""
    names = [f"host{host}" for host, count in enumerate(ranks) for _ in range(count)]
    mine = names[dist.get_rank()]
    return mock.patch.object(socket, "gethostname", return_value=mine)


# -- cells of the grid ---------------------------------------------------------------------

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
