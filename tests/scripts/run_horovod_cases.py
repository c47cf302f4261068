"""Horovod scripts that nobody has touched, run plainly and then under the watch of `run`."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch
from horovod_training import HorovodJob
from run_cases import run_both_ways
from torch import Tensor, nn
from training import STEPS, Job, adamw, mlp, sgd, train

import bytesched


def distributed(optimizer: torch.optim.Optimizer, model: nn.Module, **arguments: Any) -> Any:
    return hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), **arguments
    )


def usual(job: Job) -> None:
    model = mlp()
    optimizer = distributed(sgd(model), model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    job.record("before", model(job.inputs(0)))
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def resumed(job: Job) -> None:
    """Rank 0 alone has loaded a checkpoint, and gives it to the others, who have no state."""
    model = mlp()
    optimizer = distributed(sgd(model), model)
    if hvd.rank() == 0:
        saved = optimizer.state_dict()
        saved["state"] = {
            index: {"momentum_buffer": torch.ones_like(parameter)}
            for index, parameter in enumerate(model.parameters())
        }
        optimizer.load_state_dict(saved)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def one_rank_has_other_settings(job: Job) -> None:
    model = mlp()
    optimizer = distributed(sgd(model), model)
    own = {"BYTESCHED_POLICY": "fifo"} if job.rank else {}
    with mock.patch.dict(os.environ, own):
        train(job, model, optimizer)
    job.record_state(model, optimizer)


def called_by_one_rank(job: Job) -> None:
    """As to print a summary of the model, before there is anything to train with."""
    model = mlp()
    optimizer = distributed(adamw(model), model)
    if hvd.rank() == 0:
        job.record("outputs", model(job.inputs(0)))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


class Trainer(nn.Module):
    """Holds the model, and is not called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp()
        self.loss = nn.MSELoss()


def inside_a_trainer(job: Job) -> None:
    trainer = Trainer()
    optimizer = distributed(adamw(trainer), trainer)
    train(job, trainer.model, optimizer)
    job.record_state(trainer, optimizer)


def two_models(job: Job) -> None:
    models = [mlp(), mlp()]
    optimizers = [
        hvd.DistributedOptimizer(
            make(model),
            named_parameters=[(f"{index}.{name}", p) for name, p in model.named_parameters()],
        )
        for index, (make, model) in enumerate(zip((sgd, adamw), models, strict=True))
    ]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(job, model, optimizer, first_step=step, steps=1)
    for model, optimizer in zip(models, optimizers, strict=True):
        job.record_state(model, optimizer)


def clipped_and_accumulated(job: Job) -> None:
    model = mlp()
    optimizer = distributed(sgd(model), model, backward_passes_per_step=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            (model(job.inputs(2 * step + part)).square().mean() / 2).backward()
        optimizer.synchronize()
        job.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        with optimizer.skip_synchronize():
            optimizer.step()
    job.record_state(model, optimizer)


def compiled(job: Job, how: str) -> None:
    model = mlp()
    called: Any = torch.compile(model, backend="eager", fullgraph=True) if how == "first" else model
    optimizer = distributed(sgd(model), model)
    if how == "later":
        called = torch.compile(model, backend="eager", fullgraph=True)
    train(job, called, optimizer)
    job.record_state(model, optimizer)


def compiled_first(job: Job) -> None:
    compiled(job, "first")


def compiled_later(job: Job) -> None:
    compiled(job, "later")


def parameters_of_several_models(job: Job) -> None:
    models = nn.ModuleList([mlp(), nn.Linear(4, 4)])
    optimizer = distributed(sgd(models), models)
    first, second = models
    del models
    for step in range(STEPS):
        optimizer.zero_grad()
        second(first(job.inputs(step))).square().mean().backward()
        optimizer.step()
    job.record_state(first)
    job.record_state(second, optimizer)


def no_module(job: Job) -> None:
    weight = nn.Parameter(torch.ones(8, 4))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.1), named_parameters=[("weight", weight)]
    )

    def loss_of(x: Tensor) -> Tensor:
        return (x @ weight).square().mean()

    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(job.inputs(step)).backward()
        optimizer.step()
    job.record("weight", weight)


def wrapped_by_the_script(job: Job) -> None:
    model = mlp()
    optimizer = distributed(sgd(model), model)
    if job.wrapped:
        bytesched.wrap(optimizer, model, policy="fifo")
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def run_all(names: list[str]) -> None:
    run_both_ways({name: globals()[name] for name in names}, HorovodJob)
