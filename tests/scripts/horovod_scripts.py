"""Training scripts about what Horovod's optimizer adds: synchronize, accumulation, wire, groups."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_
from training import STEPS, adamw, backward, gradients, mlp, script, sgd, train

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
    model, optimizer = job.begin(adamw, fields={"horovod": arguments})
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
    model, optimizer = job.begin(sgd, fields={"horovod": {"backward_passes_per_step": passes}})
    for step in range(STEPS):
        accumulate(job, model, optimizer, step, passes)
    passes_of(job, model, 0, passes)
    try:
        passes_of(job, model, 5, 1)
    except AssertionError as error:
        job.record("error", str(error))
    job.record("complained", True)


@script(adamw, when="update")
def clipped(job: HorovodJob, model: Any, optimizer: Any, step: int) -> None:
    with synchronized(optimizer):
        job.record("norm", clip_grad_norm_(model.parameters(), 0.05, foreach=step % 2 == 0))
        job.record("gradients", gradients(model))


@script(adamw, when="update")
def clipped_without_synchronize(job: HorovodJob, model: Any, optimizer: Any, step: int) -> None:
    """Under plain Horovod a race; here gradients that are read are complete."""
    with contextlib.nullcontext() if job.wrapped else synchronized(optimizer):
        job.record("norm", clip_grad_norm_(model.parameters(), 0.05))
    if job.wrapped:
        optimizer.step()


@script(sgd)
def synchronized_twice(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """`synchronize()`, then `step()` without skipping it: averaged again, and warned about."""

    def average(_: int) -> None:
        optimizer.synchronize()
        job.record("gradients", gradients(model))
        # So that averaging again makes a difference.
        torch._foreach_mul_(gradients(model), 1 + job.rank)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(job, model, optimizer, before_step=average)
    job.record("warned", [str(w.message) for w in caught if "skip_synchronize" in str(w.message)])


@script(sgd)
def synchronize_alone(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """`synchronize()` several times, before any backward pass, and without a step after it."""
    optimizer.synchronize()
    job.record("gradients", gradients(model))

    def update(step: int) -> None:
        optimizer.synchronize()
        with synchronized(optimizer, steps=step % 2 == 1):
            job.record("gradients", gradients(model))

    train(job, model, optimizer, update=update)


@script(adamw, when="after_step", fields={"horovod": {"op": "Sum"}})
def steps_in_a_row(job: HorovodJob, model: Any, optimizer: Any, step: int) -> None:
    if step % 3:
        optimizer.step()


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


def grouped_by_list(job: HorovodJob) -> None:
    """Two groups that cut across layers; the rest on its own."""
    model = job.ddp(mlp())
    parameters = list(model.parameters())
    groups = [parameters[::3], parameters[1::3]]
    optimizer = job.wrap(sgd(model), model, horovod={"groups": groups})
    train(job, model, optimizer)

    def clip(_: int) -> None:
        with synchronized(optimizer):
            clip_grad_norm_(model.parameters(), 0.05)

    train(job, model, optimizer, update=clip)
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
    train(
        *(job, lambda x: model(x) * scale.sum(), optimizer),
        after_step=lambda _: job.record("scale", scale),
    )
    job.record_state(model, optimizer)


def half_on_the_wire(job: HorovodJob, op: str, factor: float, shift: float) -> None:
    """Gradients of very different size, some below what half precision has, in odd numbers."""
    model = job.ddp(nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 5)))
    arguments: dict[str, Any] = {"compression": "fp16", "op": op}
    if op == "Average":
        arguments["gradient_predivide_factor"] = factor
    optimizer = job.wrap(sgd(model), model, horovod=arguments)

    def update(_: int) -> None:
        with synchronized(optimizer):
            job.record("gradients", gradients(model))

    train(
        *(job, model, optimizer),
        loss=lambda step: model(job.inputs(step)).square().mean() * shift,
        update=update,
    )
    job.record_state(model, optimizer)


def double_precision(job: HorovodJob, factor: float) -> None:
    model = job.ddp(mlp().double())
    optimizer = job.wrap(adamw(model), model, horovod={"gradient_predivide_factor": factor})
    train(job, model, optimizer, inputs=lambda step: job.inputs(step).double())
    job.record_state(model, optimizer)


@script(
    lambda model: optim.SGD(model.parameters(), lr=0.01),
    module=lambda: nn.Sequential(nn.Linear(8, 13).half(), nn.Linear(13, 5).half()),
    when="loss",
)
def half_precision(job: HorovodJob, model: Any, optimizer: Any, step: int) -> Any:
    return model(job.inputs(step).half()).float().square().mean()
