"""Training scripts on Horovod: what a script does beside training, its models and optimizers."""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from horovod_scripts import accumulate, synchronized
from scripts_models import Branching, Mixed, batch, frozen_mlp
from torch import Tensor, nn, optim
from training import STEPS, adamw, mlp, script, sgd, train

if TYPE_CHECKING:
    from horovod_training import HorovodJob


def broadcast(job: HorovodJob) -> None:
    """Weights, optimizer state and objects broadcast right after a step must show that step."""
    model = job.ddp(mlp())
    torch.manual_seed(job.rank)
    for p in model.parameters():
        nn.init.normal_(p)
    optimizer = job.wrap(sgd(model), model)
    job.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    job.hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def share(step: int) -> None:
        if step % 4 == 0:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.01 * job.rank)
            job.hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        elif step % 4 == 1:
            job.hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        elif step % 4 == 2:
            job.hvd.broadcast_parameters(list(model.named_parameters()), root_rank=1)
        else:
            state = job.hvd.broadcast_object(optimizer.state_dict(), root_rank=0)
            optimizer.load_state_dict(state)

    train(job, model, optimizer, steps=2 * STEPS, after_step=share)
    job.record_state(model, optimizer)


@script(sgd)
def collectives_of_the_user(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """Metrics, weights and gradients handed to Horovod between and during steps."""
    first, *_, last = model.parameters()

    def update(step: int) -> None:
        loss = torch.tensor(float(step + job.rank))
        job.record("loss", job.hvd.allreduce(loss, name="loss"))
        with synchronized(optimizer):
            job.record("gradient", job.hvd.allreduce(last.grad, op=job.hvd.Sum, name="a gradient"))
        job.record("gathered", job.hvd.allgather(first.detach(), name="a weight"))
        job.record("sum", job.hvd.allreduce(last.data, op=job.hvd.Sum, name="another weight"))
        job.record("objects", job.hvd.allgather_object(float(first.sum())))
        job.hvd.barrier()

    train(job, model, optimizer, update=update)


@script(adamw)
def collectives_without_synchronize(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """The same while chunks and updates are outstanding."""
    first, *_ = model.parameters()

    def share(step: int) -> None:
        job.record("weight", job.hvd.allreduce(first, op=job.hvd.Sum, name="a weight"))
        job.record(
            "metric", job.hvd.allreduce(torch.tensor([step + job.rank]), op=job.hvd.Sum, name="m")
        )
        job.hvd.allreduce_(first.data, name="a weight in place")

    train(job, model, optimizer, after_step=share)


def resumed(job: HorovodJob) -> None:
    """Saved on one rank in the middle, loaded into new objects there, broadcast, trained on."""
    model, optimizer = job.begin(adamw)
    train(job, model, optimizer, steps=4)
    file = io.BytesIO()
    if job.rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
    job.unwrap(optimizer)
    model, optimizer = job.begin(adamw)
    if job.rank == 0:
        loaded = torch.load(file, weights_only=True)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    job.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    job.hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(job, model, optimizer, first_step=4)
    job.record_state(model, optimizer)


@script(adamw, wraps=False)
def step_hooks(job: HorovodJob, model: Any, optimizer: Any, made: str) -> None:
    """Hooks of the user's on `step()`, which torch runs twice under Horovod."""
    first = next(model.parameters())

    def warm_up(*_: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.8
        job.record("before", first)

    if made == "after":
        job.wrap(optimizer, model)
    optimizer.register_step_pre_hook(warm_up)
    optimizer.register_step_post_hook(lambda *_: job.record("after", first))
    if made == "before":
        job.wrap(optimizer, model)
    train(job, model, optimizer)


@script(sgd, fields={"horovod": {"backward_passes_per_step": 2}})
def unwrapped_in_the_middle(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """Plain Horovod's own optimizer is back, in the middle of everything, and taken again."""
    for part in range(4):
        for step in range(3):
            accumulate(job, model, optimizer, 4 * part + step, passes=2)
        if part % 2 == 0:
            job.unwrap(optimizer)
        else:
            job.wrap(optimizer, model)


def unwrapped_between_backward_and_step(job: HorovodJob, groups: int | None, op: str) -> None:
    """What has been reduced is not reduced again; what has been accumulated is not lost."""
    model = job.ddp(mlp())
    arguments = {"groups": groups, "op": op, "backward_passes_per_step": 2}
    optimizer = job.wrap(adamw(model), model, horovod=arguments)
    for step in range(8):
        optimizer.zero_grad()
        for micro in range(2):
            model(job.inputs(2 * step + micro)).square().mean().backward()
            if (step % 4 == 1 and micro == 0) or (step % 4 == 3 and micro == 1):
                job.unwrap(optimizer)
        optimizer.step()
        if step % 2:
            job.wrap(optimizer, model)
    job.record_state(model, optimizer)


def scaled(job: HorovodJob, kind: str) -> None:
    """`GradScaler` as Horovod documents it, with an overflow on one rank; or one that is "off"."""
    model, is_off = job.ddp(mlp()), kind == "off"
    optimizer = job.wrap(adamw(model, fused=kind == "fused"), model)
    scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=2, enabled=not is_off)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_off):
            loss = model(job.inputs(step)).float().square().mean()
        if step == 3 and job.rank == 1 and not is_off:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        with synchronized(optimizer, partial(scaler.step, optimizer)):
            scaler.unscale_(optimizer)
        scaler.update()
        job.record("scale", [loss, scaler.get_scale()])
    job.record_state(model, optimizer)


class Shift(nn.Module):
    """Its gradient does not depend on its weight, so autograd does not miss an older value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.weight)


@script(sgd, module=lambda: nn.Sequential(*(Shift() for _ in range(40))))
def backward_of_an_older_forward(job: HorovodJob, model: Any, optimizer: Any) -> None:
    """Two forward passes, a step, and only then the second one's backward."""
    train(job, model, optimizer, steps=3)
    for step in range(3, 9, 2):
        optimizer.zero_grad()
        now, later = (model(job.inputs(number)).square().mean() for number in (step, step + 1))
        now.backward()
        optimizer.step()
        later.backward()
        optimizer.step()


@script(sgd)
def joined_early(
    job: HorovodJob, model: Any, optimizer: Any, early: int, together: int, alone: int
) -> None:
    """One rank has fewer batches; it joins, and the other trains on with zeros from it.

    After so many steps `together` the other one makes so many `alone`.
    """
    train(job, model, optimizer, steps=together)
    if job.rank != early:
        train(job, model, optimizer, first_step=together, steps=alone)
    last = job.hvd.join()
    job.record("last to join", last)
    job.hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    train(job, model, optimizer, first_step=together + alone, steps=9)


# -- models, several of them, and several optimizers ----------------------------------------


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


def sparse(job: HorovodJob, as_dense: bool, op: str, passes: int = 1) -> None:
    dense = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12)
    model = job.ddp(nn.Sequential(nn.Embedding(12, 8, sparse=True), *dense))
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
            job.record("gradient", model.module[0].weight.grad)
    job.record_state(model, optimizer)


def mixed() -> nn.Module:
    """Horovod takes no gradients but contiguous ones."""
    model = Mixed(torch.float16)
    model.transposed = nn.Parameter(model.transposed.detach().contiguous())
    return model


@script(sgd, mixed)
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


def two_optimizers(job: HorovodJob, wraps_both: bool) -> None:
    """One for the first layer, one for the rest, stepped in both orders."""
    model = job.ddp(mlp())
    first, *rest = model.parameters()
    one = job.wrap(optim.Adam([first], lr=0.01), model)
    other = (job.wrap if wraps_both else job.distributed)(sgd(nn.ParameterList(rest)), model)

    def update(step: int) -> None:
        for optimizer in (one, other) if step % 2 and wraps_both else (other, one):
            optimizer.step()

    train(job, model, one, zero_grad=model.zero_grad, update=update)
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
