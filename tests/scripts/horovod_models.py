"""Training scripts on Horovod about models, and about several optimizers or models."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from horovod_scripts import synchronized
from scripts_models import Branching, batch, frozen_mlp
from torch import Tensor, nn, optim
from training import STEPS, adamw, backward, mlp, script, sgd, train

if TYPE_CHECKING:
    from horovod_training import HorovodJob


TURNS = ("same_on_all_ranks", "differing_ranks", "all_but_one_first")


@script(partial(adamw, weight_decay=0.1), module=Branching)
def branching(job: HorovodJob, model: Any, optimizer: Any, turns: str) -> None:
    """Parameters left out on some ranks in some steps: zeros, so that Adam moves them."""
    plans = {
        "same_on_all_ranks": ["left", "right", "both"],
        "differing_ranks": ["left", "right", "both"] if job.rank else ["right", "right", "left"],
        "all_but_one_first": ["both", "left", "right"],
    }

    def turn(step: int) -> Tensor:
        model.module.turn = plans[turns][step % 3]
        return job.inputs(step)

    train(job, model, optimizer, steps=3 * STEPS, inputs=turn)
    job.record("gradients", [p.grad for p in model.parameters()])


@script(sgd, module=Branching, when="step", fields={"horovod": {"backward_passes_per_step": 2}})
def branching_accumulated(job: HorovodJob, model: Any, optimizer: Any, step: int) -> None:
    """Each of two passes uses another branch; what is used once only is reduced in `step()`."""
    optimizer.zero_grad()
    for turn in ("left", "right" if step % 2 else "both"):
        model.module.turn = turn
        model(job.inputs(step)).square().mean().backward()
    optimizer.step()


@script(adamw, module=lambda: nn.ModuleDict({"one": mlp(), "other": mlp()}), when="step")
def two_losses_of_parts(job: HorovodJob, model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    for part in ("one", "other") if step % 2 else ("other", "one"):
        loss = model.module[part](job.inputs(step)).square().mean()
        loss.backward()
        job.record("loss", loss)
    optimizer.step()


class Text(nn.Module):
    """An embedding with sparse gradients beside dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, sparse=True)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12))

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.embed(tokens))


def sparse(job: HorovodJob, as_dense: bool, op: str, passes: int = 1) -> None:
    model = job.ddp(Text())
    arguments = {"sparse_as_dense": as_dense, "op": op, "backward_passes_per_step": passes}
    optimizer = job.wrap(sgd(model, momentum=0.0), model, horovod=arguments)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        for micro in range(passes):
            loss = model(batch(job, "tied", passes * step + micro)).square().mean()
            loss.backward()
            job.record("loss", loss)
        if step < STEPS:
            optimizer.step()
            continue
        with synchronized(optimizer):
            job.record("gradient", model.module.embed.weight.grad)
    job.record_state(model, optimizer)


class Mixed(nn.Module):
    """Layers of several precisions, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8).double()
        self.third = nn.Linear(8, 8).half()
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Any:
        x = self.second(self.first(x).double()) * self.scalar
        return self.third(x.half()).float()


@script(sgd, module=Mixed)
def mixed_dtypes(job: HorovodJob, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer)


@script(sgd, frozen_mlp)
def thawed(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """What was frozen when Horovod's optimizer was made is never averaged."""
    train(job, model, optimizer, steps=3)
    model.module[0].requires_grad_(True)
    train(job, model, optimizer, first_step=3)


def named(model: nn.Module, prefix: str) -> list[tuple[str, nn.Parameter]]:
    return [(f"{prefix}.{name}", p) for name, p in model.named_parameters()]


def two_models(job: HorovodJob) -> None:
    """A generator and a discriminator: each step of one runs the other as well."""
    generator, judge = job.ddp(mlp()), job.ddp(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    one = job.wrap(adamw(generator), generator, names=named(generator, "generator"))
    other = job.wrap(adamw(judge), judge, names=named(judge, "judge"))
    for step in range(STEPS):
        fake = generator(job.inputs(step))
        other.zero_grad()
        judged = judge(fake.detach()).mean() - judge(job.inputs(step, 4, 4)).mean()
        judged.backward()
        other.step()
        one.zero_grad()
        fooled = -judge(fake).mean()
        fooled.backward()
        one.step()
        # The second loss left gradients of the judge on their way.
        other.synchronize()
        job.record("losses", [judged, fooled])
    job.record_state(generator, one)
    job.record_state(judge, other)


def two_optimizers(job: HorovodJob) -> None:
    """One for the first layer, one for the rest, stepped in both orders."""
    model = job.ddp(mlp())
    first, *rest = model.parameters()
    one = job.wrap(optim.Adam([first], lr=0.01), model)
    other = job.wrap(optim.SGD(rest, lr=0.1, momentum=0.9), model)
    for step in range(STEPS):
        loss = backward(job, model, step)
        for optimizer in (one, other) if step % 2 else (other, one):
            optimizer.step()
        one.zero_grad()
        other.zero_grad()
        job.record("loss", loss)
    job.record_state(model, one, other)


def one_wrapped_of_two_optimizers(job: HorovodJob) -> None:
    model = job.ddp(mlp())
    first, *rest = model.parameters()
    one = job.wrap(optim.Adam([first], lr=0.01), model)
    other = job.distributed(optim.SGD(rest, lr=0.1, momentum=0.9), model)
    for step in range(STEPS):
        model(job.inputs(step)).square().mean().backward()
        other.step()
        one.step()
        model.zero_grad()
    job.record_state(model, one, other)


def process_set(job: HorovodJob, compression: str) -> None:
    added = job.hvd.add_process_set([0, 2])
    model = job.ddp(mlp())
    arguments = {"process_set": added, "gradient_predivide_factor": 1.5, "compression": compression}
    optimizer = job.wrap(adamw(model), model, horovod=arguments)
    train(job, model, optimizer)
    job.record_state(model, optimizer)
    job.close()
    job.hvd.barrier()
    job.hvd.remove_process_set(added)
