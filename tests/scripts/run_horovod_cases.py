"""Horovod scripts that nobody has touched, run plainly and then under the watch of `run`."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch
from horovod_scripts import passes_of, synchronized
from horovod_training import HorovodJob
from horovod_uses import named
from run_cases import WatchedJob, run_both_ways
from torch import Tensor, nn
from training import STEPS, Job, adamw, mlp, script, sgd, train

import bytesched


class WatchedHorovodJob(HorovodJob, WatchedJob):
    """A job whose optimizers are Horovod's, which nobody wraps but who watches."""


def broadcast(model: Any, optimizer: Any) -> None:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)


@script(sgd)
def usual(job: Job, model: Any, optimizer: Any) -> None:
    broadcast(model, optimizer)
    job.record("before", model(job.inputs(0)))
    train(job, model, optimizer)


@script(sgd)
def resumed(job: Job, model: Any, optimizer: Any) -> None:
    """Rank 0 alone has loaded a checkpoint, and gives it to the others, who have no state."""
    if hvd.rank() == 0:
        saved = optimizer.state_dict()
        saved["state"] = {
            index: {"momentum_buffer": torch.ones_like(parameter)}
            for index, parameter in enumerate(model.parameters())
        }
        optimizer.load_state_dict(saved)
    broadcast(model, optimizer)
    train(job, model, optimizer)


@script(sgd)
def one_rank_has_other_settings(job: Job, model: Any, optimizer: Any) -> None:
    own = {"BYTESCHED_POLICY": "fifo"} if job.rank else {}
    with mock.patch.dict(os.environ, own):
        train(job, model, optimizer)


@script(adamw)
def called_by_one_rank(job: Job, model: Any, optimizer: Any) -> None:
    """As to print a summary of the model, before there is anything to train with."""
    if hvd.rank() == 0:
        job.record("outputs", model(job.inputs(0)))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(job, model, optimizer)


@script(adamw)
def inside_a_trainer(job: Job, model: Any, optimizer: Any) -> None:
    """What holds the model is not called itself."""
    train(job, model.module, optimizer)


def two_models(job: Job) -> None:
    models = [mlp(), mlp()]
    optimizers = [
        job.wrap(make(model), model, names=named(model, str(index)))
        for index, (make, model) in enumerate(zip((sgd, adamw), models, strict=True))
    ]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(job, model, optimizer, first_step=step, steps=1)
    for model, optimizer in zip(models, optimizers, strict=True):
        job.record_state(model, optimizer)


@script(sgd, when="step", fields={"horovod": {"backward_passes_per_step": 2}})
def clipped_and_accumulated(job: HorovodJob, model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    passes_of(job, model, step, 2)
    with synchronized(optimizer):
        job.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def compiled_first(job: Job) -> None:
    model = mlp()
    called = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = job.wrap(sgd(model), model)
    train(job, called, optimizer)
    job.record_state(model, optimizer)


@script(sgd)
def compiled_later(job: Job, model: Any, optimizer: Any) -> None:
    train(job, torch.compile(model, backend="eager", fullgraph=True), optimizer)


def parameters_of_several_models(job: Job) -> None:
    models = nn.ModuleList([mlp(), nn.Linear(4, 4)])
    optimizer = job.wrap(sgd(models), models)
    first, second = models
    del models
    train(job, lambda x: second(first(x)), optimizer)
    job.record_state(first)
    job.record_state(second, optimizer)


def no_module(job: Job) -> None:
    weight = nn.Parameter(torch.ones(8, 4))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.1), named_parameters=[("weight", weight)]
    )

    def call(x: Tensor) -> Tensor:
        return x @ weight

    train(job, call, optimizer)
    job.record("weight", weight)


@script(sgd)
def wrapped_by_the_script(job: Job, model: Any, optimizer: Any) -> None:
    if job.wrapped:
        bytesched.wrap(optimizer, model, policy="fifo")
    train(job, model, optimizer)


def run_all(names: list[str]) -> None:
    run_both_ways({name: globals()[name] for name in names}, WatchedHorovodJob)
