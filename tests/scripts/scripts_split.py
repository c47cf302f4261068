"""Training scripts that ask for norms of all gradients, or change all of them, before step()."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from raised import raised
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from training import STEPS, Job, adamw, backward, closure_of, mlp, script, sgd, train

from bytesched.errors import PluginError


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@script(adamw, when="before_step")
def norm_of_kind(job: Job, model: Any, optimizer: Any, step: int, kind: float) -> None:
    job.record("norm", clip_grad_norm_(model.parameters(), 0.05, norm_type=kind))


@script(adamw, when="step")
def clipped_in_a_closure(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """As a trainer does: everything up to the clipped gradients is in what step() calls."""
    evaluate = closure_of(job, model, optimizer, step)

    def clipped() -> Tensor:
        loss = evaluate()
        job.record("norm", clip_grad_norm_(model.parameters(), 0.05))
        return loss

    job.record("loss", optimizer.step(clipped))


def of_first_twice(model: nn.Module) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.optim.SGD([next(model.parameters()), *model.parameters()], lr=0.1)


@script(of_first_twice, when="step")
def clipped_and_named_twice(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """A group that names a parameter twice updates it twice, with a gradient that was clipped once.

    In a closure, so that all of it is updated within step().
    """
    backward(job, model, step)
    job.record("norm", clip_grad_norm_(model.parameters(), 0.05))
    optimizer.step(lambda: torch.zeros(()))
    optimizer.zero_grad()


#: who asks for a norm
BY = ("all", "rank 0", "rank 0 before a barrier", "each of another kind")


@script(adamw, when="before_step")
def norm_logged(job: Job, model: Any, optimizer: Any, step: int, by: str) -> None:
    """Where rank 0 asks alone, the others answer nothing."""
    kind = job.rank + 1.0 if by == "each of another kind" else 2.0
    asks = step > 1 and (step % 2 or "barrier" in by) and job.rank == 0
    norm = torch.zeros(())
    if asks or "rank 0" not in by:
        norm = nn.utils.get_total_norm(_gradients(model), kind)
    job.record("norm", norm)
    if "barrier" in by:
        job.barrier()


@script(adamw, when="before_step")
def logged_by_rank_0_before_changes(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Rank 0 asks once more than others, before what all of them change."""
    if job.rank == 0:
        nn.utils.get_total_norm(_gradients(model))
    for gradient in _gradients(model):
        gradient.div_(3.0)
    job.record("norm", clip_grad_norm_(model.parameters(), 0.05))


@script(adamw, when="before_step")
def changed_out_of_sight(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Through operations and aliases that are not noted, between norms that are."""
    gradients = _gradients(model)
    job.record("norm", nn.utils.get_total_norm(gradients))
    gradients[0].add_(0.01)
    flat = gradients[2].view(-1)
    job.record("norm", clip_grad_norm_(model.parameters(), 0.05))
    gradients[2].mul_(2.0)
    flat.add_(0.001)
    job.record("flat", flat)
    job.record("norm", nn.utils.get_total_norm(gradients))


@script(adamw, when="before_step")
def norms_of_parts(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Of rows, along a dimension, of two gradients, of a kind for matrices: for nobody else."""
    weight, *_, last = _gradients(model)
    job.record("rows", [weight.norm(dim=1), (weight**2).sum(0), *weight.abs().max(dim=0)])
    job.record("kept", weight.norm(keepdim=True))
    job.record("matrix", [torch.linalg.norm(weight, 2), torch.linalg.norm(weight, "fro")])
    job.record("counted", torch.linalg.vector_norm(weight, 0))
    job.record("wide", torch.linalg.vector_norm(weight, 2, dtype=torch.float64))
    job.record("scaled", (last * torch.ones_like(last)).sum())
    job.record("shaped", weight.view(2, -1).sum())


@script(adamw, when="before_step")
def clipped_by_hand(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """As scripts did before there was a function for it."""
    total = sum(gradient.data.norm(2).item() ** 2 for gradient in _gradients(model))
    for gradient in _gradients(model):
        gradient.data.mul_(0.05 / (total**0.5 + 1e-6))
    job.record("norm", total)


#: a number for each gradient, as scripts find it by hand
BY_HAND: list[Callable[[Tensor], Tensor]] = [
    lambda grad: grad.data.norm(2),
    lambda grad: (grad**2).sum(),
    lambda grad: grad.pow(2).sum(),
    lambda grad: torch.sum(grad * grad),
    lambda grad: grad.detach().norm(),
    lambda grad: grad.float().norm(),
    lambda grad: torch.linalg.vector_norm(grad),
    lambda grad: grad.flatten().norm(),
    lambda grad: grad.detach().view(-1).norm(),
    lambda grad: grad.data.cpu().square().mean(),
    lambda grad: grad.detach().double().pow(2).sum(),
    lambda grad: grad.abs().max(),
    lambda grad: (~torch.isfinite(grad)).any(),
    lambda grad: (grad.abs() / 2 * 3).mean(),
]


@script(adamw, when="before_step")
def numbers_by_hand(job: Job, model: Any, optimizer: Any, step: int, kinds: range) -> None:
    for kind in kinds:
        job.record("numbers", torch.stack([BY_HAND[kind](g) for g in _gradients(model)]))


@script(adamw)
def squares_kept(job: Job, model: Any, optimizer: Any) -> None:
    """What was made of a gradient has the values of that moment, whatever becomes of it."""
    kept: list[Tensor] = []

    def look(step: int) -> None:
        first, second, *others = _gradients(model)
        job.record("kept", kept)
        squares = [gradient**2 for gradient in _gradients(model)]
        flat = second.view(-1)
        for gradient in _gradients(model):
            gradient.mul_(0.5)
        job.record("before", squares[0])
        job.record("sum before", squares[2].sum())
        alias = squares[1].view(-1)
        alias.add_(1.0)
        job.record("aliased", squares[1])
        if step % 2:
            flat.add_(0.001)
            others[0].add_(0.001)
        job.record("after", [(gradient**2).sum() for gradient in _gradients(model)])
        job.record("flat", flat)
        kept[:] = [*squares, first * 2, others[1].abs()]
        if step % 3:
            kept[-1].zero_()

    train(job, model, optimizer, before_step=look)


@script(adamw, when="before_step")
def each_clipped_by_itself(job: Job, model: Any, optimizer: Any, step: int) -> None:
    for p in model.parameters():
        job.record("norm", clip_grad_norm_([p], 0.02))


@script(adamw, when="before_step")
def norm_after_changes(job: Job, model: Any, optimizer: Any, step: int) -> None:
    torch._foreach_mul_(_gradients(model), 3.0)
    clip_grad_value_(model.parameters(), 0.01)
    job.record("norm", clip_grad_norm_(model.parameters(), 0.05, foreach=True))


@script(adamw, when="before_step")
def read_between_changes(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Every rank reads other gradients whole, at other moments."""
    parameters = list(model.parameters())
    if step % 2 == job.rank:
        job.record("gradient", parameters[job.rank].grad)
    job.record("norm", clip_grad_norm_(parameters, 0.05))
    job.record("clipped", parameters[-1].grad)
    torch._foreach_mul_(_gradients(model), 0.5)
    job.record("halved", [gradient.sum() for gradient in _gradients(model)])


@script(sgd, when="step")
def nonfinite_norm(job: Job, model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    scale = float("inf") if step == 3 and job.rank == 0 else 1.0
    model(job.inputs(step) * scale).square().mean().backward()
    clip = partial(clip_grad_norm_, model.parameters(), 0.05, error_if_nonfinite=True)
    said = raised(clip, RuntimeError)
    job.record("raised", said[:40])
    if said:
        model.zero_grad()
    optimizer.step()


def two_optimizers(job: Job) -> None:
    model = job.ddp(mlp())
    parameters = list(model.parameters())
    one = job.wrap(torch.optim.SGD(parameters[::2], lr=0.1), model)
    other = job.wrap(torch.optim.AdamW(parameters[1::2], lr=0.01), model)
    for step in range(STEPS):
        model.zero_grad()
        backward(job, model, step)
        for half, optimizer in ((parameters[::2], one), (parameters[1::2], other)):
            job.record("norm", clip_grad_norm_(half, 0.05))
            optimizer.step()
    job.record_state(model, one, other)


@script(adamw, when="passes")
def accumulated(job: Job, model: Any, optimizer: Any, step: int) -> None:
    for micro in range(3):
        with model.no_sync() if micro < 2 else contextlib.nullcontext():
            backward(job, model, 10 * step + micro)
    job.record("norm", clip_grad_norm_(model.parameters(), 0.05))


@script(sgd, when="step", steps=2 * STEPS)
def clipped_and_kept(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Clipped in every round, stepped in every other one: clipped gradients accumulate."""
    backward(job, model, step)
    job.record("norm", clip_grad_norm_(model.parameters(), 0.05))
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()


class Giant(nn.Module):
    """Most of its elements are in one tensor, and one layer is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.large = nn.Linear(4, 400)
        self.seldom = nn.Linear(8, 4)
        self.head = nn.Linear(400, 2)

    def forward(self, x: Tensor, *, seldom: bool) -> Tensor:
        hidden = self.inner(x)
        if seldom:
            hidden = hidden + self.seldom(x)
        output: Tensor = self.head(self.large(hidden))
        return output


@script(adamw, module=Giant, when="passes", steps=2 * STEPS, find_unused_parameters=True)
def giant_and_unused(job: Job, model: Any, optimizer: Any, step: int) -> None:
    model(job.inputs(step), seldom=step % 3 == job.rank).square().mean().backward()
    job.record("norm", clip_grad_norm_(model.parameters(), 0.05))


@script(adamw)
def aliases_kept(job: Job, model: Any, optimizer: Any) -> None:
    """Other tensors over the gradients of a round, used and changed in the next one."""
    kept: list[Tensor] = []

    def smooth(step: int) -> None:
        if not step % 2:
            kept[:] = [gradient.detach() for gradient in _gradients(model)]
        else:
            job.record("kept", nn.utils.get_total_norm(kept))
            for alias in kept:
                alias.mul_(0.5)
        job.record("norm", clip_grad_norm_(model.parameters(), 0.05))
        if step % 2:
            job.record("changed", kept[0])

    train(job, model, optimizer, before_step=smooth)


@script(adamw)
def norms_inside_backward(job: Job, model: Any, optimizer: Any) -> None:
    """A hook looks at gradients of the last step, which nobody has zeroed, during the next one."""
    first, *_ = model.parameters()

    def look(*_: Tensor) -> None:
        if first.grad is not None:
            job.record("earlier norm", first.grad.norm())

    # Of the second layer, so that gradients of the third are on the wire.
    list(model.parameters())[3].register_post_accumulate_grad_hook(look)

    def clip(_: int) -> None:
        job.record("norm", clip_grad_norm_(model.parameters(), 0.05))

    train(job, model, optimizer, before_step=clip, zero_grad=lambda: None)


def refused(alone: bool, compression: str) -> str:
    """What is said of ``split="on"``, of a plain module if it is ``alone`` or else of a DDP."""
    job = Job(wrapped=True, split="on", module_alone=alone, compression=compression)
    with contextlib.closing(job):
        model = job.ddp(nn.Linear(2, 2))
        return raised(lambda: job.wrap(sgd(model), model), PluginError)
