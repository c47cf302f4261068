"""Training scripts that do this and that to gradients which no step takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from training import STEPS, Job, adamw, backward, gradients, script, train

import bytesched


def of_last_layer(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that leaves the gradients of all other layers."""
    return torch.optim.SGD(list(model.parameters())[-2:], lr=0.1)


@script(of_last_layer)
def zeroed_in_place(job: Job, model: Any, optimizer: Any) -> None:
    """The script has arrays over them."""
    outside = list(model.parameters())[:-2]

    def look(step: int) -> None:
        if step == 1:
            job.record("arrays", [float(p.grad.numpy().sum()) for p in outside])
        if step % 3 == 2:
            for p in outside:
                p.grad.zero_()

    train(job, model, optimizer, before_step=look)
    job.record("gradients", gradients(model))


@script(of_last_layer)
def scaled_by_each_rank(job: Job, model: Any, optimizer: Any) -> None:
    """One was read, and each rank changes all in its own way before backward adds to them."""
    outside = list(model.parameters())[:-2]

    def scale(step: int) -> None:
        one = outside[step % len(outside)]
        job.record(f"{step} before", one.grad)
        for p in outside:
            p.grad.mul_(0.5 + job.rank)
        if step % 2:
            job.record(f"{step} after", one.grad)

    train(job, model, optimizer, before_step=scale)
    job.record("gradients", [p.grad for p in outside])


@script(adamw, when="before_step")
def changed_and_flushed(job: Job, model: Any, optimizer: Any, step: int) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.001)
    if job.wrapped and step % 2 == job.rank:
        bytesched.flush(optimizer)
    if step % 2:
        job.record(f"gradients {step}", gradients(model))


def some_taken_later(job: Job) -> None:
    """Parameters come where gradients lie that the step has not taken.

    Three small neighbours are sent together, and the optimizer gets one of them.
    """
    large, after, norm = nn.Linear(64, 64), nn.Linear(64, 8), nn.LayerNorm(8)
    model = job.ddp(nn.Sequential(nn.Linear(8, 64), large, nn.Tanh(), after, norm))
    small = [after.bias, *norm.parameters()]
    late = [*large.parameters(), *small]
    early = [p for p in model.parameters() if all(p is not q for q in late)]
    optimizer = job.wrap(torch.optim.SGD(early, lr=0.1), model)

    def add(step: int) -> None:
        if step == 2:
            optimizer.add_param_group({"params": small[1:2], "lr": 0.2})

    train(job, model, optimizer, after_step=add)
    job.record("gradients", [small[0].grad, small[2].grad])
    job.record_state(model, optimizer)


@script(adamw)
def kept_and_not_read(job: Job, model: Any, optimizer: Any) -> None:
    """The script has them still when those of the next round are there."""
    for step in range(STEPS):
        backward(job, model, step)
        if step % 2:
            nn.utils.clip_grad_value_(model.parameters(), 0.001)
            kept = gradients(model)
        else:
            optimizer.step()
        optimizer.zero_grad()
    job.record("kept", kept)


class Some(nn.Module):
    """So many layers of three are used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, *, of: int) -> torch.Tensor:
        for layer in self.layers[:of]:
            x = layer(x)
        return x


@script(adamw, module=Some, when="step", steps=3 * STEPS, find_unused_parameters=True)
def unused_in_between(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Gradients are added up over four rounds; one rank uses a layer, in the first and the last."""
    both = step % 4 in (0, 3) and job.rank == step % 3 % 2
    model(job.inputs(step), of=2 + both).square().mean().backward()
    if step % 8 == 6:
        job.record(f"{step}", gradients(model))
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()


@script(adamw, module=Some, when="passes", find_unused_parameters=True)
def held_and_read_when_unused(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """What a layer got in an earlier backward pass is read after one that has not used it."""
    for of in (3, 1 + step % 3):
        model(job.inputs(step), of=of).square().mean().backward()
    job.record(f"gradients {step}", [p.grad.clone() for p in model.parameters()])
