"""Training scripts about what Horovod's optimizer adds: synchronize, accumulation, wire, groups."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_
from training import STEPS, adamw, backward, mlp, script, sgd, train

if TYPE_CHECKING:
    from horovod_training import HorovodJob


@contextlib.contextmanager
def synchronized(
    optimizer: Any, step: Callable[[], object] | None = None, *, steps: bool = True
) -> Iterator[None]:
    """Between all sums and the step, as Horovod's documentation says to clip."""
    optimizer.synchronize()
    yield
    if steps:
        with optimizer.skip_synchronize():
            (step or optimizer.step)()


def passes_of(job: HorovodJob, model: Any, step: int, passes: int) -> None:
    for micro in range(passes):
        loss = model(job.inputs(10 * step + micro)).square().mean()
        loss.backward()
        job.record("loss", loss)


def accumulate(job: HorovodJob, model: Any, optimizer: Any, step: int, passes: int) -> None:
    optimizer.zero_grad()
    passes_of(job, model, step, passes)
    optimizer.step()


def given(job: HorovodJob, arguments: dict[str, Any]) -> None:
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model, horovod=arguments)
    for step in range(STEPS):
        accumulate(job, model, optimizer, step, arguments.get("backward_passes_per_step", 1))
        with torch.no_grad():
            job.record("evaluated", model(job.inputs(500 + step)))
    job.record_state(model, optimizer)


@script(sgd, fields={"horovod": {"backward_passes_per_step": 2}})
def accumulation_changed(job: HorovodJob, model: Any, optimizer: Any) -> None:
    for step, passes in enumerate((2, 2, 1, 3, 3, 1, 2)):
        optimizer.set_backward_passes_per_step(passes)
        accumulate(job, model, optimizer, step, passes)


@script(sgd, fields={"horovod": {"backward_passes_per_step": 3}})
def partial_window(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """The last step of an epoch comes after fewer passes than the others; so does the first."""
    for step, passes in enumerate((1, 3, 2, 3, 1, 3)):
        accumulate(job, model, optimizer, step, passes)


def too_many_backwards(job: HorovodJob, passes: int) -> None:
    """One backward more than was said: Horovod's own error."""
    model = job.ddp(mlp())
    optimizer = job.wrap(sgd(model), model, horovod={"backward_passes_per_step": passes})
    for step in range(STEPS):
        accumulate(job, model, optimizer, step, passes)
    passes_of(job, model, 0, passes)
    try:
        passes_of(job, model, 5, 1)
    except AssertionError as error:
        job.record("error", str(error))
    job.record("complained", True)


@script(adamw, when="step")
def clipped(job: HorovodJob, model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss = backward(job, model, step)
    with synchronized(optimizer):
        job.record("norm", clip_grad_norm_(model.parameters(), 0.05, foreach=step % 2 == 0))
        job.record("gradients", [p.grad for p in model.parameters()])
    job.record("loss", loss)


@script(adamw, when="step")
def clipped_without_synchronize(job: HorovodJob, model: Any, optimizer: Any, step: int) -> None:
    """Under plain Horovod a race; here gradients that are read are complete."""
    optimizer.zero_grad()
    backward(job, model, step)
    with contextlib.nullcontext() if job.wrapped else synchronized(optimizer):
        job.record("norm", clip_grad_norm_(model.parameters(), 0.05))
    if job.wrapped:
        optimizer.step()


@script(sgd)
def synchronized_twice(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """`synchronize()`, then `step()` without skipping it: averaged again, and warned about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(job, model, step)
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
        backward(job, model, step)
        optimizer.synchronize()
        with synchronized(optimizer, steps=step % 2 == 1):
            job.record("gradients", [p.grad for p in model.parameters()])


def steps_in_a_row(job: HorovodJob) -> None:
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model, horovod={"op": "Sum"})
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
    backward(job, model, step)
    with synchronized(optimizer):
        if step % 3 == 1:
            optimizer.zero_grad()
    model.zero_grad(set_to_none=step % 2 == 0)


ZEROINGS = ("optimizer", "model_to_none", "model_to_zero", "by_hand_to_zero", "never")


@script(sgd)
def zeroed(job: HorovodJob, model: Any, optimizer: Any, how: str) -> None:
    def by_hand() -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()

    zero: Callable[[], object] = {
        "optimizer": optimizer.zero_grad,
        "model_to_none": model.zero_grad,
        "model_to_zero": partial(model.zero_grad, set_to_none=False),
        "by_hand_to_zero": by_hand,
        "never": lambda: None,
    }[how]
    train(job, model, optimizer, zero_grad=zero)
    train(job, model, optimizer, zero_grad=lambda: None, after_step=lambda _: zero())


def grouped_by_list(job: HorovodJob) -> None:
    """Two groups that cut across layers; the rest on its own."""
    model = job.ddp(mlp())
    parameters = list(model.parameters())
    groups = [parameters[::3], parameters[1::3]]
    optimizer = job.wrap(sgd(model), model, horovod={"groups": groups})
    train(job, model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(job, model, step)
        with synchronized(optimizer):
            clip_grad_norm_(model.parameters(), 0.05)
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
    arguments: dict[str, Any] = {"compression": "fp16", "op": op}
    if op == "Average":
        arguments["gradient_predivide_factor"] = factor
    optimizer = job.wrap(sgd(model), model, horovod=arguments)
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(job.inputs(step)).square().mean() * shift).backward()
        with synchronized(optimizer):
            job.record("gradients", [p.grad for p in model.parameters()])
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
    optimizer.zero_grad()
    model(job.inputs(step).half()).float().square().mean().backward()
    optimizer.step()
