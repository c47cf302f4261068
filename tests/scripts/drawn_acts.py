"""What a script does, and should not, between backward() and step() and after it.

Each act is drawn, from all ranks' numbers or from one rank's own; plain DDP takes all of them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from looks import saved as from_file
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from training import Job, gradients

Act = Callable[[Job, Any, Any, random.Random], object]


class Interrupted(BaseException):
    """As a KeyboardInterrupt that a script catches."""


def _gradients(model: nn.Module) -> list[Tensor]:
    return [grad for grad in gradients(model) if grad is not None]


def of_one(act: Callable[[Job, Tensor], object]) -> Act:
    """With a gradient that is drawn."""

    def run(job: Job, model: Any, _: object, draw: random.Random) -> None:
        if there := _gradients(model):
            act(job, draw.choice(there))

    return run


def of_each(act: Callable[[Job, Tensor], object]) -> Act:
    return lambda job, model, *_: [act(job, gradient) for gradient in _gradients(model)]


def of_all(act: Callable[[Job, list[Tensor]], object]) -> Act:
    return lambda job, model, *_: (there := _gradients(model)) and act(job, there)


def of_parameter(act: Callable[[Any], object]) -> Act:
    """With a parameter that is drawn."""
    return lambda job, model, _, draw: act(draw.choice(list(model.parameters())))


read_one = of_one(lambda job, grad: job.record("gradient", grad))
read_as_array = of_each(lambda job, grad: job.record("array", float(grad.numpy().sum())))
flattened = of_all(
    lambda job, grads: job.record("flat", torch.cat([g.reshape(-1) for g in grads]).topk(3).values)
)
histogram = of_each(lambda job, grad: job.record("histogram", torch.histc(grad, 4)))
normed = of_all(lambda job, grads: job.record("norms", torch.stack(torch._foreach_norm(grads))))
normed_at_once = of_all(lambda job, grads: job.record("total", get_total_norm(grads)))
gradients_saved = of_all(lambda job, grads: job.record("saved gradients", from_file(grads)))
set_to_none = of_parameter(lambda p: setattr(p, "grad", None))
deleted = of_parameter(lambda p: delattr(p, "grad"))
zeroed = of_one(lambda _, grad: grad.zero_())
scaled_through_data = of_one(lambda _, grad: grad.data.div_(3.0))
rewritten = of_parameter(lambda p: setattr(p, "data", p.data.clone() * 0.9))


def clipped(job: Job, model: Any, _: object, draw: random.Random) -> None:
    job.record("norm", clip_grad_norm_(model.parameters(), draw.choice((0.01, 1.0, 100.0))))


def clipped_by_value(job: Job, model: Any, _: object, draw: random.Random) -> None:
    clip_grad_value_(model.parameters(), draw.choice((0.001, 0.1)))


def clipped_in_parts(job: Job, model: Any, _: object, draw: random.Random) -> None:
    parameters = [p for p in model.parameters() if p.grad is not None]
    draw.shuffle(parameters)
    half = len(parameters) // 2
    job.record("half", clip_grad_norm_(parameters[:half], 0.01))
    if draw.random() < 0.5:
        job.record("other half", clip_grad_norm_(parameters[half:], 0.02, foreach=False))


def clipped_otherwise_on_each_rank(job: Job, model: Any, *_: object) -> None:
    clip_grad_norm_(model.parameters(), 0.01 * (job.rank + 1))


def scaled(job: Job, model: Any, _: object, draw: random.Random) -> None:
    by = draw.choice((0.5, 2.0, 3.0))
    for gradient in _gradients(model):
        gradient.mul_(by)


def replaced(job: Job, model: Any, _: object, draw: random.Random) -> None:
    if parameters := [p for p in model.parameters() if p.grad is not None]:
        one = draw.choice(parameters)
        one.grad = one.grad.clone().add_(0.01)


def assigned_to_itself(job: Job, model: Any, *_: object) -> None:
    for p in model.parameters():
        p.grad = p.grad


def exchanged(job: Job, model: Any, *_: object) -> None:
    """Gradients of two parameters of one shape."""
    by_shape: dict[torch.Size, nn.Parameter] = {}
    for p in model.parameters():
        other = by_shape.setdefault(p.shape, p) if p.grad is not None else p
        if other is not p:
            p.grad, other.grad = other.grad, p.grad
            return


def noisy(job: Job, model: Any, _: object, draw: random.Random) -> None:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 20))
    for gradient in _gradients(model):
        gradient.add_(torch.randn(gradient.shape, generator=generator), alpha=0.01)


def copied(job: Job, model: Any, *_: object) -> None:
    copied = copy.deepcopy(model.module)
    job.record("copy", copied.state_dict())
    job.record("gradients of the copy", gradients(copied))


def saved(job: Job, model: Any, optimizer: torch.optim.Optimizer, _: object) -> None:
    job.record("saved", [*from_file(model.state_dict()).values()])
    job.record("saved optimizer", from_file(optimizer.state_dict()))


def loaded(job: Job, model: Any, optimizer: torch.optim.Optimizer, draw: random.Random) -> None:
    model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
    if draw.random() < 0.5:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def evaluated(job: Job, model: Any, *_: object) -> None:
    with torch.no_grad():
        job.record("evaluated", model.eval()(job.inputs(77)))
    model.train()


def flipped(job: Job, model: Any, _: object, draw: random.Random) -> None:
    """Frozen, with its gradient; plain DDP takes that where it looks for unused parameters."""
    one = draw.choice(list(model.parameters()))
    is_last = all(p is one or not p.requires_grad for p in model.parameters())
    one.requires_grad_(is_last or not model.find_unused_parameters)


def all_thawed(job: Job, model: Any, *_: object) -> None:
    model.requires_grad_(True)


def decayed(job: Job, model: Any, *_: object) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)


def slower(job: Job, model: Any, optimizer: torch.optim.Optimizer, draw: random.Random) -> None:
    optimizer.param_groups[draw.randrange(len(optimizer.param_groups))]["lr"] *= 0.5


def stepped_again(job: Job, model: Any, optimizer: torch.optim.Optimizer, _: object) -> None:
    optimizer.step()


def interrupted(*_: object) -> None:
    raise Interrupted


def penalised(job: Job, model: Any, *_: object) -> None:
    """A second graph over the same weights, with gradients of gradients, that DDP does not see."""
    inputs = job.inputs(55).requires_grad_(True)
    (slope,) = torch.autograd.grad(model.module(inputs).sum(), inputs, create_graph=True)
    if weights := [p for p in model.parameters() if p.requires_grad]:
        found = torch.autograd.grad(slope.square().sum(), weights, allow_unused=True)
        job.record("penalty", [g for g in found if g is not None])


#: of one rank alone, too: others do not hear of them
READING: tuple[Act, ...] = (
    *(read_one, read_as_array, flattened, histogram, normed, normed_at_once, copied),
    *(gradients_saved, penalised, assigned_to_itself),
)
#: of one rank alone, too: ranks drift apart, as they do under plain DDP
CHANGING: tuple[Act, ...] = (
    *(clipped, clipped_by_value, clipped_in_parts, clipped_otherwise_on_each_rank),
    *(set_to_none, deleted, zeroed, scaled, scaled_through_data, replaced, exchanged),
    noisy,
)
#: of all ranks
TOGETHER: tuple[Act, ...] = (
    *(saved, loaded, evaluated, flipped, all_thawed, decayed, rewritten, slower),
    *(stepped_again, interrupted),
)
#: of these, what leaves ranks apart
DIVERGING = (clipped_otherwise_on_each_rank, exchanged)
#: after step(), where gradients may be gone
AFTERWARDS: tuple[Act, ...] = (
    *(saved, loaded, evaluated, decayed, rewritten, slower, copied, penalised, all_thawed),
)
