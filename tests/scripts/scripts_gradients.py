"""Training scripts about gradients: accumulation, clipping, reading and writing them."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint
from training import STEPS, Job, adamw, as_array, mlp, script, sgd, train


@script(sgd, when="step")
def no_sync(job: Job, model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    for micro in range(3):
        with model.no_sync() if micro < 2 else contextlib.nullcontext():
            loss = model(job.inputs(10 * step + micro)).square().mean() / 3
            loss.backward()
        if micro == 0:
            job.record("local gradients", [p.grad for p in model.parameters()])
        job.record("loss", loss)
    optimizer.step()


@script(adamw, when="step")
def sync_attribute(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Accumulation by setting DDP's attribute, which counts at forward and not at backward."""
    for micro in range(3):
        model.require_backward_grad_sync = micro == 2
        loss = model(job.inputs(10 * step + micro)).square().mean()
        model.require_backward_grad_sync = micro != 2
        loss.backward()
        job.record("loss", loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@script(sgd, when="step")
def accumulation_of_averages(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Several synchronised backwards per step."""
    optimizer.zero_grad()
    for micro in range(3):
        model(job.inputs(10 * step + micro)).square().mean().backward()
    optimizer.step()


@script(sgd, when="step")
def several_forwards_one_backward(job: Job, model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    one, other = model(job.inputs(step)), model(job.inputs(step + 100))
    loss = (one - other).square().mean()
    loss.backward()
    optimizer.step()
    job.record("loss", loss)


@script(adamw, when="before_step")
def clip_norm(job: Job, model: Any, optimizer: Any, step: int) -> None:
    job.record("norm", clip_grad_norm_(model.parameters(), 0.05, foreach=step % 2 == 0))


@script(sgd, when="before_step")
def clip_by_total_norm(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """The two halves of clipping called one by one, on the gradients the user listed."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    job.record("norm", norm)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)


@script(sgd, when="before_step")
def clip_value(job: Job, model: Any, optimizer: Any, step: int) -> None:
    clip_grad_value_(model.parameters(), 0.01)


@script(sgd, when="before_step")
def clip_some(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Only the last layer's gradients are touched between backward and step."""
    last = list(model.parameters())[-2:]
    clip_grad_norm_(last, 0.05)


@script(adamw, when="before_step")
def gradients_scaled_in_place(job: Job, model: Any, optimizer: Any, step: int) -> None:
    for p in model.parameters():
        p.grad.mul_(0.5)


@script(sgd, when="before_step")
def gradients_written_through_data(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Noise added to `p.grad.data`, and one row set to zero by indexing."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    for p in weights:
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
    """Every way of looking at a gradient between backward and step."""
    grads = [p.grad for p in model.parameters()]
    first = grads[step % len(grads)]
    job.record("printed", repr(first))
    job.record("listed", first.tolist())
    job.record("norm", first.norm())
    job.record("data", first.data)
    job.record("array", as_array(first))
    job.record("item", float(first.flatten()[0]))
    job.record("stacked", torch.cat([grad.flatten() for grad in grads]))
    job.record("grouped", torch._foreach_norm(grads))
    job.record("kept", first.clone())


@script(sgd, when="after_step")
def gradients_read_after_step(job: Job, model: Any, optimizer: Any, step: int) -> None:
    job.record("gradients", [p.grad for p in model.parameters()])


@script(sgd)
def gradients_kept(job: Job, model: Any, optimizer: Any) -> None:
    """References to gradients that outlive `zero_grad` and later steps."""
    kept: list[Tensor] = []
    train(
        job,
        model,
        optimizer,
        before_step=lambda _: kept.extend(p.grad for p in model.parameters()),
    )
    job.record("kept", kept)


@script(sgd)
def zeroed(job: Job, model: Any, optimizer: Any, how: str) -> None:
    """Every way of clearing gradients, right after the step and at the head of the loop."""

    def zero() -> None:
        if how == "to_none":
            optimizer.zero_grad(set_to_none=True)
        elif how == "to_zero":
            optimizer.zero_grad(set_to_none=False)
        elif how == "model":
            model.zero_grad()
        elif how == "by_hand_to_none":
            for p in model.parameters():
                p.grad = None
        elif how == "by_hand_to_zero":
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
        elif how == "detached":
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.detach_()
                    p.grad.fill_(0)
        elif how == "deleted":
            for p in model.parameters():
                del p.grad

    train(job, model, optimizer, zero_grad=zero, after_step=lambda _: zero())
    train(job, model, optimizer, zero_grad=zero, first_step=STEPS)
    job.record("gradients", [p.grad for p in model.parameters()])


ZEROINGS = (
    "to_none",
    "to_zero",
    "model",
    "by_hand_to_none",
    "by_hand_to_zero",
    "detached",
    "deleted",
    "never",
)


def user_gradient_hooks(job: Job) -> None:
    """Tensor hooks change the gradient before it is averaged, as they do under DDP."""
    model = job.ddp(mlp())
    for index, p in enumerate(model.parameters()):
        p.register_hook(lambda grad, index=index: grad * (index + 1))
    optimizer = job.wrap(sgd(model), model)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def user_hooks_after_accumulation(job: Job, made: str) -> None:
    """Hooks on accumulated gradients change them too, whoever registered first."""
    model = job.ddp(mlp())
    optimizer = sgd(model)

    def triple(p: Tensor) -> None:
        assert p.grad is not None
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
    job.record_state(model, optimizer)


@script(sgd)
def user_hooks_registered_late(job: Job, model: Any, optimizer: Any) -> None:
    """Hooks that come when rounds have settled, of each parameter at another time."""
    parameters = list(model.parameters())

    def triple(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(3.0)

    def before_step(step: int) -> None:
        if step < len(parameters):
            parameters[step].register_post_accumulate_grad_hook(triple)

    train(job, model, optimizer, before_step=before_step)


def norms_of_nested_passes(job: Job) -> None:
    """Every backward pass of a layer runs inside another one, and one parameter takes no part."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:2]:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    # DDP cannot look for what is unused behind such a checkpoint.
    model = Checkpointed()
    optimizer = job.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(job.inputs(step).requires_grad_()).square().sum().backward()
        if not job.wrapped:
            for p in layers[:2].parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad.div_(dist.get_world_size()))
        job.record(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
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
    grads = torch.autograd.grad(loss, parameters)
    for p, grad in zip(parameters, grads, strict=True):
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
    module=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False)),
    when="step",
)
def gradient_penalty(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Double backward: the loss contains the gradient of the output by the input."""
    optimizer.zero_grad()
    inputs = job.inputs(step).requires_grad_()
    out = model(inputs).square().mean()
    (slope,) = torch.autograd.grad(out, inputs, create_graph=True)
    loss = out + slope.square().sum()
    loss.backward()
    optimizer.step()
    job.record("loss", loss)


@script(sgd, when="step")
def two_losses(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Two graphs that share the model's forward, run backward together."""
    optimizer.zero_grad()
    out = model(job.inputs(step))
    torch.autograd.backward([out.square().mean(), out.abs().mean()])
    optimizer.step()


def compressing(job: Job, model: Any, dtype: str) -> None:
    """DDP's own hook for the wire format, where nothing is wrapped."""
    hooks: dict[str, Any] = {
        "bf16": default_hooks.bf16_compress_hook,
        "fp16": default_hooks.fp16_compress_hook,
    }

    # DDP refuses the bf16 hook by its name on Gloo, though it works there.
    def compress(state: Any, bucket):  # type: ignore[no-untyped-def]
        return hooks[dtype](state, bucket)

    if not job.wrapped:
        model.register_comm_hook(None, compress)


def compressed(job: Job, dtype: str) -> None:
    """The wire format against DDP's own hook for the same one."""
    model = job.ddp(mlp())
    compressing(job, model, dtype)
    optimizer = job.wrap(sgd(model), model, compression=dtype)
    train(job, model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        # So small that it matters whether rounding or averaging comes first.
        (model(job.inputs(step)).square().mean() * 1e-5).backward()
        job.record("small", [p.grad for p in model.parameters()])
        optimizer.step()
    job.record_state(model, optimizer)


def compressed_and_clipped(job: Job, dtype: str, views: bool) -> None:
    """From the first step on; what is clipped is what is read after it, and what is stepped."""
    model = job.ddp(mlp(), gradient_as_bucket_view=views)
    compressing(job, model, dtype)
    optimizer = job.wrap(adamw(model), model, compression=dtype)

    def clip(_: int) -> None:
        job.record("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        job.record("clipped", [p.grad for p in model.parameters()])

    train(job, model, optimizer, before_step=clip)
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
    job.record("gradients", [p.grad for p in model.parameters()])
    zero = partial(optimizer.zero_grad, set_to_none=False)
    train(job, model, optimizer, before_step=assign, zero_grad=zero)
    job.record("gradients", [p.grad for p in model.parameters()])


@script(adamw)
def flat_gradients(job: Job, model: Any, optimizer: Any, preset: str) -> None:
    """Gradients are views of one buffer of the script's own, which it reads, clips and zeroes."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))

    def use_flat() -> None:
        parts = flat.split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            if preset == "data" and p.grad is not None:
                p.grad.data = part.view_as(p)
            else:
                p.grad = part.view_as(p)

    if preset == "before":
        use_flat()
    else:
        train(job, model, optimizer, steps=2)
        use_flat()

    def clip(_: int) -> None:
        job.record("norm", flat.norm())
        flat.clamp_(-0.01, 0.01)

    train(job, model, optimizer, before_step=clip, zero_grad=flat.zero_)
    job.record("flat", flat)
    job.record("gradients", [p.grad for p in parameters])


@script(adamw)
def gradients_over_arrays(job: Job, model: Any, optimizer: Any) -> None:
    """They have the memory of numpy's arrays, which the script reads."""
    arrays = [np.zeros(tuple(p.shape), np.float32) for p in model.parameters()]
    for parameter, array in zip(model.parameters(), arrays, strict=True):
        parameter.grad = torch.from_numpy(array)

    def read(_: int) -> None:
        job.record("arrays", [torch.from_numpy(array.copy()) for array in arrays])

    def zero_grad() -> None:
        for array in arrays:
            array.fill(0)

    train(job, model, optimizer, before_step=read, zero_grad=zero_grad)


@script(sgd)
def gradients_referred_to(job: Job, model: Any, optimizer: Any) -> None:
    """A list of the gradients made once; they stay the same tensors, and are zeroed in place."""
    train(job, model, optimizer, steps=2)
    gradients = [p.grad for p in model.parameters()]
    flattened = [p.grad.view(-1) for p in model.parameters()]

    def look(_: int) -> None:
        job.record("norms", torch._foreach_norm(gradients))
        job.record(
            "same", [p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)]
        )
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


def gradients_kept_by_a_hook(job: Job) -> None:
    """What a hook of the script's own has put aside shows what is reduced."""
    model = job.ddp(mlp())
    kept: list[Tensor] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    optimizer = job.wrap(sgd(model), model)
    train(job, model, optimizer)
    job.record("kept", kept)
    job.record_state(model, optimizer)


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
        try:
            torch.autograd.grad(loss, inputs, retain_graph=True)
        except RuntimeError as error:
            job.record("refused", "modified by an inplace operation" in str(error))
        else:
            job.record("refused", None)


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
