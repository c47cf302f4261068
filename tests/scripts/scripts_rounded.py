"""Training under autocast, with parameters that travel rounded."""

from __future__ import annotations

import contextlib
import copy
from typing import Any
from unittest import mock

import torch
from scripts_shard import uneven
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Job, adamw, mlp, train

import bytesched
from bytesched.plugins.c10d.split.sharded import ShardedExchange
from bytesched.plugins.session.masters import MASTER
from bytesched.task import CommTask


def _train(job: Job, model: Any, optimizer: Any, *, first_step: int = 0, steps: int = 3) -> None:
    for step in range(first_step, first_step + steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(job.inputs(step))
        loss = out.float().square().mean()
        loss.backward()
        if step % 2:
            job.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        if step == 4:
            # In memory of its own: this one cannot wait.
            one = model.module[0].bias
            one.grad = one.grad.clone()
        optimizer.step()
        job.record("loss", loss)


def _record(job: Job, model: Any, optimizer: Any) -> None:
    """What is seen of parameters, rounded; all digits of them; and the rest of the state."""
    state = optimizer.state_dict()["state"]
    parameters = list(model.parameters())
    for index, parameter in enumerate(parameters):
        entry = dict(state[index])
        job.record("all digits", entry.pop(MASTER, parameter))
        job.record("entry", entry)
        rounded = parameter.detach().bfloat16()
        job.record("rounded", rounded)
        if job.wrapped:
            assert torch.equal(parameter, rounded.float())


def linear(job: Job) -> None:
    model = job.ddp(uneven())
    optimizer = job.wrap(adamw(model), model)
    _train(job, model, optimizer, steps=7)
    _record(job, model, optimizer)


def written(job: Job) -> None:
    """The script writes to parameters: in place, through `data`, by loading a checkpoint."""
    model = job.ddp(uneven())
    optimizer = job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    content = {name: torch.full_like(v, 0.25) for name, v in model.module.state_dict().items()}
    _train(job, model, optimizer)
    model.module.load_state_dict(content)
    _train(job, model, optimizer)
    with torch.no_grad():
        model.module[0].weight.fill_(0.5)
        model.module[2].weight[0, 0] = 0.5
    model.module[0].bias.data = torch.full_like(model.module[0].bias, 0.125)
    _train(job, model, optimizer)
    job.record("optimizer", {})
    state = optimizer.state_dict()["state"]
    for index, parameter in enumerate(model.parameters()):
        job.record("all digits", (state.get(index) or {}).get(MASTER, parameter))


def resumed(job: Job) -> None:
    """From a checkpoint of the model, which is rounded, and the optimizer, which is not."""
    model = job.ddp(uneven())
    optimizer = job.wrap(adamw(model), model)
    _train(job, model, optimizer)
    saved = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
    _train(job, model, optimizer, first_step=3)
    _record(job, model, optimizer)
    for is_loaded_first in (True, False):
        module = uneven()
        module.load_state_dict(saved[0])
        again = job.ddp(module)
        other = adamw(again)
        if is_loaded_first:
            other.load_state_dict(copy.deepcopy(saved[1]))
        job.wrap(other, again)
        if not is_loaded_first:
            other.load_state_dict(copy.deepcopy(saved[1]))
        _train(job, again, other, first_step=3)
        _record(job, again, other)


def unwrapped(job: Job) -> None:
    """All digits are in the parameters again."""
    model = job.ddp(uneven())
    optimizer = job.wrap(adamw(model), model)
    _train(job, model, optimizer)
    job.unwrap(optimizer)
    _train(job, model, optimizer, first_step=3)
    job.record_state(model, optimizer)


def bytes_sent(gather_dtype: object) -> int:
    """By this rank, of parameters."""
    job = Job(wrapped=True, shard=True, gather_dtype=gather_dtype)
    sent = []
    find = ShardedExchange._spread_memory

    def found(exchange: ShardedExchange, chunk: CommTask) -> torch.Tensor:
        memory = find(exchange, chunk)
        sent.append(memory.nbytes)
        return memory

    with contextlib.closing(job), mock.patch.object(ShardedExchange, "_spread_memory", found):
        model = job.ddp(uneven())
        optimizer = job.wrap(adamw(model), model)
        train(job, model, optimizer, steps=3)
        bytesched.flush(optimizer)
    return sum(sent)


def refusals() -> list[str]:
    """What is raised where a parameter is no float32 one, and where ranks disagree."""
    found = []
    rank = Job.own_rank()
    for model, dtype in (
        (mlp().double(), torch.bfloat16),
        (mlp(), torch.bfloat16 if rank else None),
    ):
        ddp = DistributedDataParallel(model)
        try:
            bytesched.wrap(adamw(ddp), ddp, shard=True, gather_dtype=dtype)
        except bytesched.BytesschedError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
