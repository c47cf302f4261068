"""Training scripts whose updates are sharded, and what can be seen of it on each rank."""

from __future__ import annotations

import contextlib

import torch
from training import STEPS, Job, adamw, mlp, train

import bytesched


def entries_held() -> set[int]:
    """By number, the parameters whose state this rank has after the first step."""
    job = Job(wrapped=True, shard=True)
    with contextlib.closing(job):
        model = job.ddp(mlp())
        optimizer = job.wrap(adamw(model), model)
        train(job, model, optimizer, steps=1)
        bytesched.flush(optimizer)
        return {
            index
            for index, parameter in enumerate(model.parameters())
            if dict.get(optimizer.state, parameter)
        }


def parameters_outside_the_optimizer(job: Job) -> None:
    """Gradients that no optimizer consumes add up, averaged anew at every step."""
    model = job.ddp(mlp())
    outside, *inside = model.parameters()
    optimizer = job.wrap(torch.optim.SGD(inside, lr=0.1), model)
    train(job, model, optimizer)
    job.record("gradient", outside.grad)
    job.record_state(model, optimizer)


def gradient_read_after_step() -> int:
    """How many reads are refused on this rank, with a word about it."""
    job = Job(wrapped=True, shard=True)
    refused = 0
    with contextlib.closing(job):
        model = job.ddp(mlp())
        train(job, model, job.wrap(adamw(model), model), steps=2)
        for parameter in model.parameters():
            try:
                parameter.grad.sum()
            except bytesched.PluginError as error:
                refused += "read after step()" in str(error)
    return refused


def gradients_not_zeroed() -> str:
    """What a backward pass raises that would add to gradients which are elsewhere."""
    job = Job(wrapped=True, shard=True)
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model)
    try:
        for step in range(STEPS):
            model(job.inputs(step)).square().mean().backward()
            optimizer.step()
    except bytesched.PluginError as error:
        return f"{step}: {error}"
    finally:
        with contextlib.suppress(bytesched.BytesschedError):
            job.close()
    return ""


def loaded(job: Job) -> None:
    """A plain checkpoint, loaded in front of wrap and after some steps."""
    model = job.ddp(mlp())
    plain = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    plain.zero_grad()
    content = plain.state_dict()
    optimizer = adamw(model)
    optimizer.load_state_dict(content)
    job.wrap(optimizer, model)
    train(job, model, optimizer, steps=3)
    job.record("optimizer", optimizer.state_dict())
    optimizer.load_state_dict(content)
    train(job, model, optimizer, steps=3)
    job.record_state(model, optimizer)


def entries_after_unwrap() -> tuple[int, bool]:
    """How many entries an optimizer has that is a plain one again, and whether it steps."""
    job = Job(wrapped=True, shard=True)
    with contextlib.closing(job):
        model = job.ddp(mlp())
        optimizer = job.wrap(adamw(model), model)
        train(job, model, optimizer, steps=3)
        job.unwrap(optimizer)
        train(job, model, optimizer, steps=1)
        return len(optimizer.state), type(optimizer.state[next(model.parameters())]) is dict


def saved(path: str) -> None:
    """Trains a little, and rank 0 alone saves what an optimizer holds."""
    job = Job(wrapped=True, shard=True)
    with contextlib.closing(job):
        model = job.ddp(mlp())
        optimizer = job.wrap(adamw(model), model)
        train(job, model, optimizer, steps=3)
        if job.rank == 0:
            torch.save(optimizer.state_dict(), path)


def loaded_from(job: Job, path: str) -> None:
    """Goes on from a checkpoint of another number of ranks."""
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model)
    optimizer.load_state_dict(torch.load(path))
    train(job, model, optimizer)
    job.record_state(model, optimizer)
