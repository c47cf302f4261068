"""Training by ranks that believe to share hosts, and in each cell of the grid."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from raised import prints_and_ends, raised
from restless import ScriptedJob
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from training import Job, adamw, mlp, sgd, train

import bytesched


def refused(ranks: list[int]) -> str:
    """What `wrap` says of a hierarchy on such hosts."""
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with on_named_hosts(ranks):
        return raised(lambda: bytesched.wrap(optimizer, model, hierarchy="on"))


def exact(job: Job) -> None:
    """Sums of small whole numbers: without rounding, in whatever order."""
    model = job.ddp(nn.Linear(7, 5, bias=False))
    nn.init.zeros_(model.module.weight)
    optimizer = job.wrap(sgd(model, lr=0.5, momentum=0.0), model)
    train(
        job, model, optimizer, loss=lambda step: model((job.inputs(step, 4, 7) * 3).round()).sum()
    )
    job.record_state(model, optimizer)


def rank_3_dies() -> None:
    """In the middle of training, between two rounds of its own."""
    with on_named_hosts([2, 2]):
        model = DistributedDataParallel(mlp())
        optimizer = bytesched.wrap(adamw(model), model, hierarchy="on", timeout_s=100.0)

    def train() -> None:
        for step in range(8):
            if step == 4 and dist.get_rank() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        bytesched.flush()

    prints_and_ends(train)


def on_named_hosts(ranks: Sequence[int]) -> Any:
    """Hosts that have so many ``ranks``, in their order."""
    names = [f"host{host}" for host, count in enumerate(ranks) for _ in range(count)]
    mine = names[dist.get_rank()]
    return mock.patch.object(socket, "gethostname", return_value=mine)


class HostsJob(ScriptedJob):
    """A job whose hosts have so many ranks, with a tuner if there are turns for it."""

    def __init__(
        self, *, wrapped: bool, hosts: Sequence[int] = (), turns: Any = (), **fields: Any
    ) -> None:
        if turns:
            super().__init__(wrapped=wrapped, turns=turns, **fields)
        else:
            Job.__init__(self, wrapped=wrapped, **fields)
        self._named = on_named_hosts(hosts) if hosts else contextlib.nullcontext()
        self._named.__enter__()

    def record_state(self, model: nn.Module, *optimizers: Optimizer) -> None:
        super().record_state(model, *optimizers)
        digest = hashlib.sha256()
        for weight in model.state_dict().values():
            digest.update(weight.cpu().numpy().tobytes())
        self.stats["digest"] = digest.hexdigest()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._named.__exit__(None, None, None)
