"""What a script does, and should not, between backward() and step() and after it.

Each act is drawn, from all ranks' numbers or from one rank's own; plain DDP takes all of them.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from training import Job

Act = Callable[[Job, nn.Module, torch.optim.Optimizer, random.Random], object]


class Interrupted(BaseException):
    """As a KeyboardInterrupt that a script catches."""


def _with_gradients(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.grad is not None]


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _inner(model: nn.Module) -> nn.Module:
    inner = model.module
    assert isinstance(inner, nn.Module)
    return inner


def clipped(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    job.record("norm", clip_grad_norm_(model.parameters(), draw.choice((0.01, 1.0, 100.0))))


def clipped_by_value(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    clip_grad_value_(model.parameters(), draw.choice((0.001, 0.1)))


def clipped_in_parts(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    parameters = _with_gradients(model)
    draw.shuffle(parameters)
    half = len(parameters) // 2
    job.record("half", clip_grad_norm_(parameters[:half], 0.01))
    if draw.random() < 0.5:
        job.record("other half", clip_grad_norm_(parameters[half:], 0.02, foreach=False))


def clipped_otherwise_on_each_rank(
    job: Job, model: nn.Module, _: object, draw: random.Random
) -> None:
    clip_grad_norm_(model.parameters(), 0.01 * (job.rank + 1))


def read_one(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    if gradients := _gradients(model):
        job.record("gradient", draw.choice(gradients))


def read_as_array(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    for gradient in _gradients(model):
        job.record("array", float(gradient.numpy().sum()))


def flattened(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    if gradients := _gradients(model):
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        job.record("flat", flat.topk(min(3, flat.numel())).values)


def histogram(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    for gradient in _gradients(model)[:2]:
        job.record("histogram", torch.histc(gradient, 4))


def normed_at_once(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    if gradients := _gradients(model):
        job.record("norms", torch.stack(torch._foreach_norm(gradients)))
        job.record("total", get_total_norm(gradients))


def set_to_none(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    draw.choice(list(model.parameters())).grad = None


def deleted(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    del draw.choice(list(model.parameters())).grad


def zeroed(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    if gradients := _gradients(model):
        draw.choice(gradients).zero_()


def scaled(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    by = draw.choice((0.5, 2.0, 3.0))
    for gradient in _gradients(model):
        gradient.mul_(by)


def scaled_through_data(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    if gradients := _gradients(model):
        draw.choice(gradients).data.div_(3.0)


def replaced(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    if parameters := _with_gradients(model):
        one = draw.choice(parameters)
        assert one.grad is not None
        one.grad = one.grad.clone().add_(0.01)


def assigned_to_itself(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    for p in model.parameters():
        p.grad = p.grad


def exchanged(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    """Gradients of two parameters of one shape."""
    by_shape: dict[torch.Size, nn.Parameter] = {}
    for p in _with_gradients(model):
        other = by_shape.setdefault(p.shape, p)
        if other is not p:
            p.grad, other.grad = other.grad, p.grad
            return


def noisy(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 20))
    for gradient in _gradients(model):
        gradient.add_(torch.randn(gradient.shape, generator=generator), alpha=0.01)


def copied(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    copied = copy.deepcopy(_inner(model))
    job.record("copy", copied.state_dict())
    job.record("gradients of the copy", [p.grad for p in copied.parameters()])


def saved(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, draw: random.Random
) -> None:
    file = io.BytesIO()
    torch.save({"weights": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    job.record("saved", [*loaded["weights"].values()])
    job.record("saved optimizer", loaded["optimizer"])


def gradients_saved(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    file = io.BytesIO()
    torch.save(_gradients(model), file)
    file.seek(0)
    job.record("saved gradients", torch.load(file, weights_only=True))


def loaded(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, draw: random.Random
) -> None:
    model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
    if draw.random() < 0.5:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def evaluated(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    with torch.no_grad():
        job.record("evaluated", model.eval()(job.inputs(77)))
    model.train()


def flipped(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    """Frozen, with its gradient; plain DDP takes that where it looks for unused parameters."""
    one = draw.choice(list(model.parameters()))
    is_last = all(p is one or not p.requires_grad for p in model.parameters())
    one.requires_grad_(is_last or not model.find_unused_parameters)


def all_thawed(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    for p in model.parameters():
        p.requires_grad_(True)


def decayed(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)


def rewritten(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    one = draw.choice(list(model.parameters()))
    one.data = one.data.clone() * 0.9


def slower(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, draw: random.Random
) -> None:
    optimizer.param_groups[draw.randrange(len(optimizer.param_groups))]["lr"] *= 0.5


def stepped_again(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, draw: random.Random
) -> None:
    optimizer.step()


def interrupted(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    raise Interrupted


def penalised(job: Job, model: nn.Module, _: object, draw: random.Random) -> None:
    """A second graph over the same weights, with gradients of gradients, that DDP does not see."""
    inner = _inner(model)
    inputs = job.inputs(55).requires_grad_(True)
    (slope,) = torch.autograd.grad(inner(inputs).sum(), inputs, create_graph=True)
    weights = [p for p in inner.parameters() if p.requires_grad]
    if not weights:
        return
    gradients = torch.autograd.grad(slope.square().sum(), weights, allow_unused=True)
    job.record("penalty", [g for g in gradients if g is not None])


#: of one rank alone, too: others do not hear of them
READING = (
    *(read_one, read_as_array, flattened, histogram, normed_at_once, copied),
    *(gradients_saved, penalised, assigned_to_itself),
)
#: of one rank alone, too: ranks drift apart, as they do under plain DDP
CHANGING = (
    *(clipped, clipped_by_value, clipped_in_parts, clipped_otherwise_on_each_rank),
    *(set_to_none, deleted, zeroed, scaled, scaled_through_data, replaced, exchanged),
    noisy,
)
#: of all ranks
TOGETHER = (
    *(saved, loaded, evaluated, flipped, all_thawed, decayed, rewritten, slower),
    *(stepped_again, interrupted),
)
#: of these, what leaves ranks apart
DIVERGING = (clipped_otherwise_on_each_rank, exchanged)
#: after step(), where gradients may be gone
AFTERWARDS = (
    *(saved, loaded, evaluated, decayed, rewritten, slower, copied, penalised, all_thawed),
)
