"""Training scripts about what Horovod's optimizer adds: synchronize, accumulation, wire, groups."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_
from training import STEPS, adamw, backward, mlp, script, sgd, train

if TYPE_CHECKING:
    from horovod_training import HorovodJob


def accumulated(job: HorovodJob, passes: int) -> None:
    """Several backward passes per step, with an evaluation between them."""
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model, horovod={"backward_passes_per_step": passes})
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(passes):
            loss = model(job.inputs(10 * step + micro)).square().mean() / passes
            loss.backward()
            job.record("loss", loss)
            with torch.no_grad():
                job.record("evaluated", model(job.inputs(500 + step)))
        optimizer.step()
    job.record_state(model, optimizer)


@script(sgd, fields={"horovod": {"backward_passes_per_step": 2}})
def accumulation_changed(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """The number of passes is another one from step to step."""
    for step, passes in enumerate((2, 2, 1, 3, 3, 1, 2)):
        optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        for micro in range(passes):
            model(job.inputs(10 * step + micro)).square().mean().backward()
        optimizer.step()


@script(sgd, fields={"horovod": {"backward_passes_per_step": 3}})
def partial_window(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """The last step of an epoch comes after fewer passes than the others; so does the first."""
    for step, passes in enumerate((1, 3, 2, 3, 1, 3)):
        optimizer.zero_grad()
        for micro in range(passes):
            model(job.inputs(10 * step + micro)).square().mean().backward()
        optimizer.step()


def too_many_backwards(job: HorovodJob, passes: int) -> None:
    """One backward more than was said: Horovod's own error, and training goes on after a step."""
    model = job.ddp(mlp())
    optimizer = job.wrap(sgd(model), model, horovod={"backward_passes_per_step": passes})
    train_accumulated(job, model, optimizer, passes)
    for micro in range(passes):
        model(job.inputs(micro)).square().mean().backward()
    try:
        model(job.inputs(50)).square().mean().backward()
    except AssertionError as error:
        job.record("error", str(error))
    job.record("complained", True)


def train_accumulated(job: HorovodJob, model: Any, optimizer: Any, passes: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(passes):
            model(job.inputs(10 * step + micro)).square().mean().backward()
        optimizer.step()


@script(adamw, when="step")
def clipped(job: HorovodJob, model: Any, optimizer: Any, step: int) -> None:
    """Clipping as Horovod's documentation says."""
    optimizer.zero_grad()
    loss = backward(job, model, step)
    optimizer.synchronize()
    job.record("norm", clip_grad_norm_(model.parameters(), 0.05, foreach=step % 2 == 0))
    job.record("gradients", [p.grad for p in model.parameters()])
    with optimizer.skip_synchronize():
        optimizer.step()
    job.record("loss", loss)


@script(adamw, when="step")
def clipped_without_synchronize(job: HorovodJob, model: Any, optimizer: Any, step: int) -> None:
    """Under plain Horovod a race; here gradients that are read are complete."""
    optimizer.zero_grad()
    model(job.inputs(step)).square().mean().backward()
    if not job.wrapped:
        optimizer.synchronize()
    job.record("norm", clip_grad_norm_(model.parameters(), 0.05))
    if job.wrapped:
        optimizer.step()
    else:
        with optimizer.skip_synchronize():
            optimizer.step()


@script(sgd)
def synchronized_twice(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """`synchronize()`, then `step()` without skipping it: averaged again, and warned about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            optimizer.zero_grad()
            model(job.inputs(step)).square().mean().backward()
            optimizer.synchronize()
            job.record("gradients", [p.grad for p in model.parameters()])
            with torch.no_grad():
                for p in model.parameters():
                    # So that averaging again makes a difference.
                    p.grad.mul_(1 + job.rank)
            optimizer.step()
    job.record("warned", [str(w.message) for w in caught if "skip_synchronize" in str(w.message)])


@script(sgd)
def synchronize_alone(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """`synchronize()` several times, before any backward pass, and without a step after it."""
    optimizer.synchronize()
    job.record("gradients", [p.grad for p in model.parameters()])
    for step in range(STEPS):
        optimizer.zero_grad()
        model(job.inputs(step)).square().mean().backward()
        optimizer.synchronize()
        optimizer.synchronize()
        job.record("gradients", [p.grad for p in model.parameters()])
        if step % 2:
            with optimizer.skip_synchronize():
                optimizer.step()


def steps_in_a_row(job: HorovodJob) -> None:
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model, horovod={"op": job.hvd.Sum})
    train(job, model, optimizer, after_step=lambda step: step % 3 and optimizer.step())
    job.record_state(model, optimizer)


@script(partial(adamw, weight_decay=0.1))
def step_without_backward(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """Parameters without a gradient get zeros, so that decay and momentum move them."""
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    train(job, model, optimizer, after_step=lambda _: (optimizer.zero_grad(), optimizer.step()))


@script(sgd)
def zeroed_before_step(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """`zero_grad()` between backward and step is an error of Horovod's; the step is still good."""
    complaints = []

    def zero(_: int) -> None:
        try:
            optimizer.zero_grad()
        except AssertionError as error:
            complaints.append(str(error)[:30])

    train(job, model, optimizer, before_step=zero)
    job.record("complaints", complaints)


@script(sgd, when="step")
def zeroed_after_synchronize(job: HorovodJob, model: Any, optimizer: Any, step: int) -> None:
    model(job.inputs(step)).square().mean().backward()
    optimizer.synchronize()
    if step % 3 == 1:
        optimizer.zero_grad()
    with optimizer.skip_synchronize():
        optimizer.step()
    model.zero_grad(set_to_none=step % 2 == 0)


ZEROINGS = ("optimizer", "model_to_none", "model_to_zero", "by_hand_to_zero", "never")


@script(sgd)
def zeroed(job: HorovodJob, model: Any, optimizer: Any, how: str) -> None:
    def zero() -> None:
        if how == "optimizer":
            optimizer.zero_grad()
        elif how == "model_to_none":
            model.zero_grad(set_to_none=True)
        elif how == "model_to_zero":
            model.zero_grad(set_to_none=False)
        elif how == "by_hand_to_zero":
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.zero_()

    train(job, model, optimizer, zero_grad=zero)
    train(job, model, optimizer, zero_grad=lambda: None, after_step=lambda _: zero())


def one_argument(job: HorovodJob, **horovod: Any) -> None:
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model, horovod=horovod)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def predivided(job: HorovodJob, factor: float) -> None:
    one_argument(job, gradient_predivide_factor=factor)


def reduced_by(job: HorovodJob, op: str) -> None:
    one_argument(job, op=getattr(job.hvd, op))


def grouped(job: HorovodJob, groups: int, passes: int) -> None:
    model = job.ddp(mlp())
    arguments = {"groups": groups, "backward_passes_per_step": passes}
    optimizer = job.wrap(adamw(model), model, horovod=arguments)
    train_accumulated(job, model, optimizer, passes)
    job.record_state(model, optimizer)


def grouped_and_predivided(job: HorovodJob) -> None:
    """Horovod does not divide what it sums in groups beforehand."""
    one_argument(job, groups=2, gradient_predivide_factor=3.0)


def grouped_by_list(job: HorovodJob) -> None:
    """Two groups that cut across layers; the rest on its own."""
    model = job.ddp(mlp())
    parameters = list(model.parameters())
    groups = [parameters[::3], parameters[1::3]]
    optimizer = job.wrap(sgd(model), model, horovod={"groups": groups})
    train(job, model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(job.inputs(step)).square().mean().backward()
        optimizer.synchronize()
        clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
    job.record_state(model, optimizer)


def grouped_with_others(job: HorovodJob) -> None:
    """One of the groups has a parameter that is not the model's."""
    model = job.ddp(mlp())
    scale = nn.Parameter(torch.ones(3))
    names = [*model.named_parameters(), ("scale", scale)]
    groups = [[*list(model.parameters())[2:4], scale]]
    parameters = [{"params": [p for _, p in names]}]
    optimizer = job.wrap(
        optim.AdamW(parameters, lr=0.01), model, names=names, horovod={"groups": groups}
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = (model(job.inputs(step)) * scale.sum()).square().mean()
        loss.backward()
        optimizer.step()
        job.record("scale", scale)
    job.record_state(model, optimizer)


def half_on_the_wire(job: HorovodJob, op: str, factor: float, shift: float) -> None:
    """Gradients of very different size, some below what half precision has, in odd numbers."""
    model = job.ddp(nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 5)))
    arguments = {"compression": job.hvd.Compression.fp16, "op": getattr(job.hvd, op)}
    if op == "Average":
        arguments["gradient_predivide_factor"] = factor
    optimizer = job.wrap(sgd(model), model, horovod=arguments)
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(job.inputs(step)).square().mean() * shift).backward()
        optimizer.synchronize()
        job.record("gradients", [p.grad for p in model.parameters()])
        with optimizer.skip_synchronize():
            optimizer.step()
    job.record_state(model, optimizer)


def double_precision(job: HorovodJob, factor: float) -> None:
    model = job.ddp(mlp().double())
    optimizer = job.wrap(adamw(model), model, horovod={"gradient_predivide_factor": factor})
    train(job, model, optimizer, inputs=lambda step: job.inputs(step).double())
    job.record_state(model, optimizer)


@script(
    lambda model: optim.SGD(model.parameters(), lr=0.01),
    module=lambda: nn.Sequential(nn.Linear(8, 13).half(), nn.Linear(13, 5).half()),
    when="step",
)
def half_precision(job: HorovodJob, model: Any, optimizer: Any, step: int) -> None:
    """A model in half precision beside one layer in single precision."""
    optimizer.zero_grad()
    model(job.inputs(step).half()).float().square().mean().backward()
    optimizer.step()
