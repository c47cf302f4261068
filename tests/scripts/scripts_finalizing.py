"""Scripts that finalize DDP's backward pass themselves, and lazy buckets: from torch 2.15 on."""

from __future__ import annotations

import copy
import io
from contextlib import closing
from functools import partial
from typing import Any

import torch
from raised import raised
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import STEPS, Job, adamw, backward, gradients, mlp, script, sgd, train

from bytesched.plugins.bench.block import reset_peak as resident_bytes
from bytesched.plugins.c10d.shell import take_over


class ByHandJob(Job):
    """A job whose models under DDP wait for nothing until they are told."""

    def ddp(self, module: nn.Module, **arguments: Any) -> Any:
        model = super().ddp(module, **arguments)
        model.require_manual_backward_finalization = True
        return model


def finalized(job: Job, arguments: dict[str, bool]) -> None:
    model, optimizer = job.begin(adamw, **arguments)

    def finalize(step: int) -> None:
        model.finalize_backward()
        job.record("gradients", gradients(model))

    train(job, model, optimizer, before_step=finalize)
    job.record_state(model, optimizer)


@script(sgd, when="before_step")
def finalized_and_clipped(job: Job, model: Any, optimizer: Any, step: int) -> None:
    model.finalize_backward()
    job.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@script(adamw, when="step", steps=STEPS + 1)
def finalized_late(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """The step is made when the next iteration begins."""
    if step:
        model.finalize_backward()
        optimizer.step()
        optimizer.zero_grad()
    if step < STEPS:
        job.record("loss", backward(job, model, step))


@script(sgd, when="passes")
def finalized_after_no_sync(job: Job, model: Any, optimizer: Any, step: int) -> None:
    with model.no_sync():
        backward(job, model, step)
    backward(job, model, step + 50)
    model.finalize_backward()
    job.record("gradients", gradients(model))


def finalized_in_backward(job: Job, wrapped_from: int, looks_for_unused: bool) -> None:
    """Where DDP lets it, a hook makes the step while backward goes on in front of the model."""
    front = nn.Linear(8, 8)
    model = job.ddp(mlp(), find_unused_parameters=looks_for_unused)
    optimizer = adamw(model)

    def end(*_: object) -> None:
        model.finalize_backward()
        optimizer.step()

    for step in range(2 * STEPS):
        if step == wrapped_from:
            job.wrap(optimizer, model)
        optimizer.zero_grad()
        inputs = front(job.inputs(step))
        loss = model(inputs).square().mean()
        is_late = model.should_finalize_after_backward
        if not is_late:
            inputs.register_hook(end)
        loss.backward()
        if is_late:
            end()
        job.record("loss", loss)
    job.record_state(model, optimizer)


@script(adamw)
def finalized_once_unwrapped(job: Job, model: Any, optimizer: Any) -> None:
    """DDP does as it was told when it has its gradients back."""
    train(job, model, optimizer, before_step=lambda _: model.finalize_backward())
    job.unwrap(optimizer)
    train(job, model, optimizer, before_step=lambda _: model.finalize_backward())
    model.require_manual_backward_finalization = False
    train(job, model, optimizer)


def lazy_buckets(job: Job, arguments: dict[str, bool]) -> None:
    """And again, when DDP has its gradients back."""
    model, optimizer = job.begin(adamw, **arguments)
    train(job, model, optimizer)
    job.unwrap(optimizer)
    train(job, model, optimizer)
    job.record("gradients", gradients(model))
    job.record_state(model, optimizer)


@script(adamw, wraps=False, gradient_as_bucket_view=True)
def views_of_dropped_buckets(job: Job, model: Any, optimizer: Any) -> None:
    """Gradients that are views of DDP's buckets when it is wrapped, and are zeroed in place."""

    def some_steps() -> None:
        train(job, model, optimizer, steps=3, zero_grad=partial(optimizer.zero_grad, False))
        job.record("gradients", gradients(model))

    some_steps()
    job.wrap(optimizer, model)
    job.record("gradients", gradients(model))
    some_steps()
    job.unwrap(optimizer)
    some_steps()


def finalized_unasked() -> str:
    """What a hook is told that finalizes inside backward without asking."""
    with closing(ByHandJob(wrapped=True)) as job:
        model = job.ddp(mlp())
        job.wrap(adamw(model), model)
        inputs = job.inputs(0).requires_grad_()
        inputs.register_hook(lambda _: model.finalize_backward())
        return raised(lambda: model(inputs).square().mean().backward(), RuntimeError)


def freed_bytes() -> int:
    """What is freed when the gradients of a model of 40 MB are no longer DDP's."""
    module = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(10)))
    model = DistributedDataParallel(module)
    for _ in range(2):
        model(torch.ones(1, 1000)).mean().backward()
        model.zero_grad()
    before = resident_bytes()
    take_over(model)
    return before - resident_bytes()


@script(adamw, wraps=False, when="step")
def finalized_first(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Wrapped between two steps of a script that finalizes late: nothing is lost."""
    optimizer.zero_grad()
    backward(job, model, step)
    if step == 3:
        job.wrap(optimizer, model)
    model.finalize_backward()
    job.record("gradients", [torch.clone(p.grad) for p in model.parameters()])
    optimizer.step()


@script(adamw)
def copied_and_saved(job: Job, model: Any, optimizer: Any) -> None:
    """Copies of a wrapped model are DDP's own, and finalize what they have reduced."""
    train(job, model, optimizer, before_step=lambda step: model.finalize_backward())
    file = io.BytesIO()
    torch.save(model, file)
    assert b"bytesched" not in file.getvalue()
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        backward(job, twin, 100)
        twin.finalize_backward()
        job.record("gradients of a copy", gradients(twin))
