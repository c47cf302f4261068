"""Training scripts about gradients: accumulation, clipping, reading and writing them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from raised import raised
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint
from training import STEPS, Job, adamw, as_array, backward, gradients, mlp, script, sgd, train


@script(sgd, when="passes")
def no_sync(job: Job, model: Any, optimizer: Any, step: int) -> None:
    for micro in range(3):
        with model.no_sync() if micro < 2 else contextlib.nullcontext():
            job.record("loss", backward(job, model, 10 * step + micro))
        if micro == 0:
            job.record("local gradients", gradients(model))


@script(adamw, when="passes")
def sync_attribute(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Accumulation by setting DDP's attribute, which counts at forward and not at backward."""
    for micro in range(3):
        model.require_backward_grad_sync = micro == 2
        loss = model(job.inputs(10 * step + micro)).square().mean()
        model.require_backward_grad_sync = micro != 2
        loss.backward()
        job.record("loss", loss)


@script(sgd, when="loss")
def several_forwards_one_backward(job: Job, model: Any, optimizer: Any, step: int) -> Any:
    return (model(job.inputs(step)) - model(job.inputs(step + 100))).square().mean()


@script(adamw, when="before_step")
def clip_norm(job: Job, model: Any, optimizer: Any, step: int) -> None:
    job.record("norm", clip_grad_norm_(model.parameters(), 0.05, foreach=step % 2 == 0))


@script(sgd, when="before_step")
def clip_some(job: Job, model: Any, optimizer: Any, step: int) -> None:
    if step % 2:
        clip_grad_norm_(list(model.parameters())[-2:], 0.05)
    else:
        clip_grad_value_(model.parameters(), 0.01)


@script(adamw, when="before_step")
def gradients_written(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Scaled in place; or noise is added to `p.grad.data`, and a row set to zero by indexing."""
    for p in model.parameters():
        if step % 2:
            p.grad.mul_(0.5)
        elif p.ndim > 1:
            p.grad.data.add_(0.01)
            p.grad[0] = 0


@script(sgd, when="before_step")
def gradients_replaced(job: Job, model: Any, optimizer: Any, step: int) -> None:
    for index, p in enumerate(model.parameters()):
        if (index + step) % 3 == 0:
            p.grad = p.grad.sign() if step % 2 else torch.ones_like(p)


@script(adamw, when="before_step")
def gradients_dropped(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """A gradient set to None after backward: its parameter must not move."""
    for index, p in enumerate(model.parameters()):
        if index % STEPS == step:
            p.grad = None


@script(sgd, when="before_step")
def gradients_read(job: Job, model: Any, optimizer: Any, step: int) -> None:
    grads = gradients(model)
    first = grads[step % len(grads)]
    job.record("values", [repr(first), first.tolist(), float(first.flatten()[0])])
    job.record("tensors", [first.norm(), first.data, as_array(first), first.clone()])
    job.record("stacked", torch.cat([grad.flatten() for grad in grads]))
    job.record("grouped", torch._foreach_norm(grads))


@script(sgd, when="after_step")
def gradients_read_after_step(job: Job, model: Any, optimizer: Any, step: int) -> None:
    job.record("gradients", gradients(model))


@script(sgd)
def gradients_kept(job: Job, model: Any, optimizer: Any, to_none: bool = True) -> None:
    """References to gradients of the round before are read in the next one, behind `zero_grad`.

    With views, in plain DDP too, they have become that round's.
    """
    kept: list[Any] = []

    def keep(step: int) -> None:
        if step % 2:
            job.record("kept", kept)
        kept[:] = gradients(model)

    # Horovod's takes no argument.
    zero_grad = None if to_none else partial(optimizer.zero_grad, set_to_none=False)
    train(job, model, optimizer, steps=STEPS + 1, before_step=keep, zero_grad=zero_grad)
    job.record("kept", kept)


def each_detached(model: Any) -> None:
    for grad in gradients(model):
        if grad is not None:
            grad.detach_()
            grad.fill_(0)


def each_set_to_none(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def each_deleted(model: Any) -> None:
    for parameter in model.parameters():
        del parameter.grad


#: ways of clearing gradients
ZEROINGS: dict[str, Callable[[Any, Any], object]] = {
    "to_none": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "to_zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "by_hand_to_none": lambda model, _: each_set_to_none(model),
    "by_hand_to_zero": lambda model, _: [g.zero_() for g in gradients(model) if g is not None],
    "detached": lambda model, _: each_detached(model),
    "deleted": lambda model, _: each_deleted(model),
    "never": lambda model, _: None,
}


@script(sgd)
def zeroed(job: Job, model: Any, optimizer: Any, how: str) -> None:
    """Right after the step and at the head of the loop."""
    zero = partial(ZEROINGS[how], model, optimizer)
    train(job, model, optimizer, zero_grad=zero, after_step=lambda _: zero())
    train(job, model, optimizer, zero_grad=zero, first_step=STEPS)
    job.record("gradients", gradients(model))


@script(sgd, wraps=False)
def user_gradient_hooks(job: Job, model: Any, optimizer: Any) -> None:
    for index, p in enumerate(model.parameters()):
        p.register_hook(lambda grad, index=index: grad * (index + 1))
    train(job, model, job.wrap(optimizer, model))


@script(sgd, wraps=False)
def user_hooks_after_accumulation(job: Job, model: Any, optimizer: Any, made: str) -> None:
    """Hooks on accumulated gradients change them too, whoever registered first."""

    def triple(p: Any) -> None:
        if p.ndim == 2:
            # Other strides than the parameter's.
            p.grad = (p.grad * 3.0).t().contiguous().t()
        else:
            p.grad.mul_(3.0)

    if made == "after":
        job.wrap(optimizer, model)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(triple)
    if made == "before":
        job.wrap(optimizer, model)
    train(job, model, optimizer)


@script(sgd, when="before_step")
def user_hooks_registered_late(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Hooks that come when rounds have settled, of each parameter at another time."""

    def triple(p: Any) -> None:
        p.grad.mul_(3.0)

    for p in list(model.parameters())[step : step + 1]:
        p.register_post_accumulate_grad_hook(triple)


class Nested(nn.Module):
    """Every backward pass of a layer runs inside another one, and one layer takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def norms_of_nested_passes(job: Job) -> None:
    # DDP cannot look for what is unused behind such a checkpoint.
    model = Nested()
    optimizer = job.wrap(sgd(model), model)

    def norm(step: int) -> None:
        for grad in gradients(model.layers[:2]) if not job.wrapped else ():
            dist.all_reduce(grad.div_(dist.get_world_size()))
        job.record(f"norm {step}", clip_grad_norm_(model.parameters(), 1.0))

    train(
        job,
        model,
        optimizer,
        inputs=lambda step: job.inputs(step).requires_grad_(),
        before_step=norm,
    )
    job.record_state(model, optimizer)


@script(sgd, when="before_step")
def gradients_zeroed_before_step(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """A step with nothing to apply, and one with zeros, which still moves the momentum."""
    if step % 3:
        optimizer.zero_grad(set_to_none=step % 3 == 1)


@script(sgd)
def collectives_of_the_user(job: Job, model: Any, optimizer: Any) -> None:
    """Gradients and weights handed to `torch.distributed`, which reads them in C++."""
    parameters = list(model.parameters())

    def average(step: int) -> None:
        for p in parameters[step % 2 :: 2]:
            dist.all_reduce(p.grad)
            dist.broadcast(p.grad, step % 2)

    def gather(step: int) -> None:
        p = parameters[step % len(parameters)]
        gathered = [torch.zeros_like(p) for _ in range(2)]
        dist.all_gather(gathered, p)
        job.record("gathered", gathered)
        with torch.no_grad():
            other = parameters[step % 3]
            dist.all_reduce(other)
            dist.broadcast(other, 1)

    train(job, model, optimizer, before_step=average, after_step=gather)


@script(sgd, when="step")
def autograd_grad(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """`autograd.grad` goes past DDP; the script averages by itself and sets `p.grad`."""
    parameters = list(model.parameters())
    loss = model(job.inputs(step)).square().mean()
    for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        dist.all_reduce(grad)
        p.grad = grad / 2
    job.record("loss", loss)
    optimizer.step()
    optimizer.zero_grad()
    if step % 3 == 0:
        train(job, model, optimizer, steps=1, first_step=step)


@script(sgd, when="after_step")
def functional_call(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """A look at the loss elsewhere, with weights that are not the model's."""
    shifted = {name: p + 0.1 for name, p in model.module.named_parameters()}
    out = torch.func.functional_call(model.module, shifted, (job.inputs(step),))
    job.record("elsewhere", out)


@script(
    sgd,
    lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False)),
    when="loss",
)
def gradient_penalty(job: Job, model: Any, optimizer: Any, step: int) -> Any:
    """Double backward: the loss contains the gradient of the output by the input."""
    inputs = job.inputs(step).requires_grad_()
    out = model(inputs).square().mean()
    (slope,) = torch.autograd.grad(out, inputs, create_graph=True)
    return out + slope.square().sum()


@script(sgd, when="passes")
def two_losses(job: Job, model: Any, optimizer: Any, step: int) -> None:
    out = model(job.inputs(step))
    torch.autograd.backward([out.square().mean(), out.abs().mean()])


def compressing(job: Job, model: Any, dtype: str) -> None:
    """DDP's own hook for the wire format, where nothing is wrapped."""
    hook: Any = getattr(default_hooks, f"{dtype}_compress_hook")

    # DDP refuses the bf16 hook by its name on Gloo, though it works there.
    def compress(state: Any, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    if not job.wrapped:
        model.register_comm_hook(None, compress)


def compressed(job: Job, dtype: str, views: bool = False) -> None:
    """The wire format against DDP's own hook for the same one; clipped from the first step on."""
    model = job.ddp(mlp(), gradient_as_bucket_view=views)
    compressing(job, model, dtype)
    optimizer = job.wrap(adamw(model), model, compression=dtype)

    def clip(_: int) -> None:
        job.record("norm", clip_grad_norm_(model.parameters(), 0.05))
        job.record("clipped", gradients(model))

    train(job, model, optimizer, before_step=clip)
    train(
        job,
        model,
        optimizer,
        # So small that it matters whether rounding or averaging comes first.
        loss=lambda step: model(job.inputs(step)).square().mean() * 1e-5,
        before_step=lambda _: job.record("small", gradients(model)),
    )
    job.record_state(model, optimizer)


@script(sgd)
def gradient_data_assigned(job: Job, model: Any, optimizer: Any) -> None:
    """`p.grad.data` and `p.grad.set_()`: other memory under the same object."""

    def assign(step: int) -> None:
        for index, p in enumerate(model.parameters()):
            if (index + step) % 3 == 0:
                p.grad.data = p.grad.data * 0.5
            elif (index + step) % 3 == 1:
                p.grad.set_(torch.ones_like(p) * step)

    train(job, model, optimizer, before_step=assign)
    job.record("gradients", gradients(model))
    zero = partial(optimizer.zero_grad, set_to_none=False)
    train(job, model, optimizer, before_step=assign, zero_grad=zero)
    job.record("gradients", gradients(model))


@script(adamw)
def flat_gradients(job: Job, model: Any, optimizer: Any, preset: str) -> None:
    """Gradients are views of one buffer of the script's own, which it reads, clips and zeroes.

    With "arrays" it has the memory of one of numpy's, which the script reads and zeroes.
    """
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    array = np.zeros(sum(sizes), np.float32)
    flat = torch.from_numpy(array) if preset == "arrays" else torch.zeros(len(array))
    if preset in ("grad", "data"):
        train(job, model, optimizer, steps=2)
    for p, part in zip(parameters, flat.split(sizes), strict=True):
        if preset == "data":
            p.grad.data = part.view_as(p)
        else:
            p.grad = part.view_as(p)

    def clip(_: int) -> None:
        job.record("sum", float(array.sum()) if preset == "arrays" else flat.sum())
        flat.clamp_(-0.01, 0.01)

    zero_grad = partial(array.fill, 0) if preset == "arrays" else flat.zero_
    train(job, model, optimizer, before_step=clip, zero_grad=zero_grad)
    job.record("flat", flat)
    job.record("gradients", gradients(model))


@script(sgd)
def gradients_referred_to(job: Job, model: Any, optimizer: Any) -> None:
    """A list of the gradients made once; they stay the same tensors, and are zeroed in place."""
    train(job, model, optimizer, steps=2)
    kept = gradients(model)
    flattened = [grad.view(-1) for grad in kept]

    def look(_: int) -> None:
        job.record("norms", torch._foreach_norm(kept))
        job.record("same", [a is b for a, b in zip(gradients(model), kept, strict=True)])
        job.record("sums", [view.sum() for view in flattened])

    zero = partial(optimizer.zero_grad, set_to_none=False)
    train(job, model, optimizer, before_step=look, after_step=look, zero_grad=zero)


@script(sgd)
def gradients_seen_through_views(job: Job, model: Any, optimizer: Any) -> None:
    """Views of gradients outlive them, and keep their values."""
    kept: list[Tensor] = []

    def keep(step: int) -> None:
        for p in model.parameters():
            kept.append((p.grad.data, p.grad.detach(), p.grad.view(-1))[step % 3])
        kept.append(kept[-1].view(-1)[1:])

    train(job, model, optimizer, before_step=keep)
    job.record("kept", kept)


@script(sgd, wraps=False)
def gradients_kept_by_a_hook(job: Job, model: Any, optimizer: Any) -> None:
    """What a hook of the script's own has put aside shows what is reduced."""
    kept: list[Tensor] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    job.wrap(optimizer, model)
    train(job, model, optimizer)
    job.record("kept", kept)


@script(sgd, when="step")
def old_graph(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """A graph that has saved weights from before the step: they are no more what they were."""
    weights = [p for p in model.parameters() if p.ndim == 2]
    optimizer.zero_grad()
    x = job.inputs(step).requires_grad_()
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    for inputs in (x, *weights[:-1]):
        said = raised(lambda: torch.autograd.grad(loss, inputs, retain_graph=True), RuntimeError)  # noqa: B023
        job.record("refused", "modified by an inplace operation" in said)


@script(sgd)
def arrays_of_gradients(job: Job, model: Any, optimizer: Any) -> None:
    """Arrays of numpy over gradients and over views of them outlive both, and keep their values."""
    kept: list[Any] = []

    def keep(step: int) -> None:
        for index, p in enumerate(model.parameters()):
            kept.append((p.grad.numpy(), p.grad.detach().cpu().numpy())[(step + index) % 2])
            if step == 3:
                kept[-1][:] = 0.5

    train(job, model, optimizer, before_step=keep)
    zero = partial(optimizer.zero_grad, set_to_none=False)
    train(job, model, optimizer, before_step=keep, zero_grad=zero)
    job.record("kept", [torch.from_numpy(array.copy()) for array in kept])
