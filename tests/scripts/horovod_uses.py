"""Training scripts on Horovod: what a script does beside training, between and during steps."""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from horovod_scripts import accumulate, synchronized
from scripts_optimizers import SCHEDULES
from torch import Tensor, nn
from training import STEPS, adamw, backward, mlp, script, sgd, train

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
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = backward(job, model, step)
        job.record("loss", job.hvd.allreduce(loss.detach(), name="loss"))
        with synchronized(optimizer):
            job.record("gradient", job.hvd.allreduce(last.grad, op=job.hvd.Sum, name="a gradient"))
        job.record("gathered", job.hvd.allgather(first.detach(), name="a weight"))
        job.record("sum", job.hvd.allreduce(last.data, op=job.hvd.Sum, name="another weight"))
        job.record("objects", job.hvd.allgather_object(float(first.sum())))
        job.hvd.barrier()


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
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model)
    train(job, model, optimizer, steps=4)
    file = io.BytesIO()
    if job.rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
    job.unwrap(optimizer)
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model)
    if job.rank == 0:
        loaded = torch.load(file, weights_only=True)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    job.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    job.hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(job, model, optimizer, first_step=4)
    job.record_state(model, optimizer)


def scheduled(job: HorovodJob, name: str) -> None:
    model = job.ddp(mlp())
    optimizer = job.distributed(sgd(model), model)
    scheduler = SCHEDULES[name](optimizer)
    job.wrap(optimizer, model)
    train(job, model, optimizer, after_step=lambda _: scheduler.step())
    job.record_state(model, optimizer)


def step_hooks(job: HorovodJob, made: str) -> None:
    """Hooks of the user's on `step()`, which torch runs twice under Horovod."""
    model = job.ddp(mlp())
    optimizer = job.distributed(adamw(model), model)
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
    job.record_state(model, optimizer)


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


@script(adamw)
def scaler_off(job: HorovodJob, model: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(job.inputs(step)).float().square().mean()
        scaler.scale(loss).backward()
        with synchronized(optimizer, partial(scaler.step, optimizer)):
            scaler.unscale_(optimizer)
        scaler.update()
        job.record("loss", loss)


def scaled(job: HorovodJob, fused: bool) -> None:
    """`GradScaler` as Horovod documents it, with an overflow on one rank."""
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model, fused=fused), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(job.inputs(step)).square().mean()
        if step == 3 and job.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        with synchronized(optimizer, partial(scaler.step, optimizer)):
            scaler.unscale_(optimizer)
        scaler.update()
        job.record("scale", scaler.get_scale())
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
