"""Training scripts whose updates are sharded, and what can be seen of it on each rank."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from raised import raised
from scripts_reading import in_child
from scripts_split import of_first_twice
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from training import STEPS, Job, adamw, backward, closure_of, gradients, mlp, script, sgd, train

import bytesched


def uneven() -> nn.Sequential:
    """Most of its elements are in one layer, of an odd size: no rank may have it alone."""
    return nn.Sequential(nn.Linear(8, 95), nn.Tanh(), nn.Linear(95, 77), nn.Linear(77, 4))


@contextlib.contextmanager
def sharded(
    steps: int,
    module: Callable[[], nn.Module] = mlp,
    make: Callable[..., Any] = adamw,
    inputs: Callable[[int], torch.Tensor] | None = None,
) -> Iterator[tuple[Job, Any, Any]]:
    """A job whose updates are sharded, its model and optimizer, after so many steps."""
    with contextlib.closing(Job(wrapped=True, shard=True)) as job:
        model, optimizer = job.begin(make, module)
        train(job, model, optimizer, steps=steps, inputs=inputs)
        yield job, model, optimizer


def entries_held() -> set[int]:
    """By number, the parameters whose state this rank has after the first step."""
    with sharded(1) as (_, model, optimizer):
        bytesched.flush(optimizer)
        return {
            index
            for index, parameter in enumerate(model.parameters())
            if dict.get(optimizer.state, parameter)
        }


@script(adamw)
def unwrapped_before_step(job: Job, model: Any, optimizer: Any) -> None:
    """The step that a plain optimizer takes is that of whole gradients."""
    train(job, model, optimizer, steps=2)
    closure_of(job, model, optimizer, 2)()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    job.unwrap(optimizer)
    job.record("gradients", gradients(model))
    optimizer.step()
    train(job, model, optimizer, steps=1, first_step=3)


@script(adamw, uneven)
def hooked_last(job: Job, model: Any, optimizer: Any) -> None:
    """Hooks that are registered in front of a step, and so run after ours, change gradients."""
    parameters = list(model.parameters())

    def clip() -> None:
        job.record("norm", nn.utils.clip_grad_norm_(parameters, 0.01))

    def halve() -> None:
        for parameter in parameters:
            parameter.grad.mul_(0.5)

    def replace() -> None:
        for parameter in parameters[::2]:
            parameter.grad = parameter.grad * 2
        parameters[1].grad = None
        optimizer.param_groups[0]["lr"] *= 0.5

    def read() -> None:
        job.record("gradients", [float(p.grad.numpy().sum()) for p in parameters])

    for step, change in enumerate([clip, halve, replace, read, replace, clip]):
        closure_of(job, model, optimizer, step)()
        hook = optimizer.register_step_pre_hook(lambda *_, change=change: change())
        optimizer.step()
        hook.remove()


@script(adamw, uneven, when="step")
def all_in_closures(job: Job, model: Any, optimizer: Any, step: int) -> None:
    if step % 3 == 0:
        optimizer.register_step_pre_hook(lambda *_: None)
    job.record("loss", optimizer.step(closure_of(job, model, optimizer, step)))


def asked_between_steps(job: Job) -> None:
    model = job.ddp(uneven())
    front, *rest = model.module
    one = job.wrap(adamw(front), model)
    other = job.wrap(sgd(nn.ModuleList(rest), momentum=0.0), model)

    def update(step: int) -> None:
        one.step()
        if job.rank == 1:
            job.record("seen", front.weight if step % 2 else one.state_dict())
        other.step()

    train(job, model, one, zero_grad=model.zero_grad, update=update)
    job.record_state(model, one, other)


@script(adamw, when="after_step")
def saved_before_a_barrier(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """The first rank alone saves, and the others wait for it."""
    if job.rank == 0 and step % 2:
        job.record("optimizer", optimizer.state_dict())
    dist.barrier()


class Tempered(nn.Module):
    """One rank owns its scalar, of which another optimizer has the state."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.temperature = mlp(), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x) * self.temperature


def saved_by_all(job: Job) -> None:
    """Whole states, before a collective of the script, and after all ranks have cleared theirs."""
    model = job.ddp(Tempered())
    parts = model.module.body.parameters(), [model.module.temperature]
    optimizers = [job.wrap(torch.optim.AdamW(part, lr=0.01), model) for part in parts]

    def update(step: int) -> None:
        backward(job, model, step)
        for optimizer in optimizers:
            optimizer.step()
            if step == 2:
                optimizer.state.clear()
            if step in (1, 4):
                job.record(f"state {step}", optimizer.state_dict())
                dist.all_gather_object([None] * dist.get_world_size(), step)

    train(job, model, optimizers[0], zero_grad=model.zero_grad, update=update)
    job.record_state(model, *optimizers)


@script(adamw, module=uneven, when="step")
def read_after_step(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Gradients are what the optimizer has taken, with all changes, and backward adds to them."""
    if step % 3 == 0:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    backward(job, model, step)
    nn.utils.clip_grad_value_(model.parameters(), 0.001)
    optimizer.step()
    if step % 2:
        job.record(f"gradients {step}", [p.grad.clone() for p in model.parameters()])


def read_by_one_rank() -> str:
    """What is raised on this rank where rank 0 alone reads a gradient."""
    said = ""
    with contextlib.suppress(bytesched.BytesschedError), sharded(2) as (job, model, optimizer):

        def read() -> None:
            closure_of(job, model, optimizer, 2)()
            if job.rank == 0:
                float(model.module[0].weight.grad.numpy().sum())
            optimizer.step()

        said = raised(read, bytesched.MismatchError)
    return said


def asked_when_others_have_let_go() -> int:
    """How many entries the first rank gets, which asks when the others have no optimizer left."""
    with sharded(3) as (job, _, optimizer):
        found = len(optimizer.state_dict()["state"]) if job.rank == 0 else 0
        job.drop()
    return found


def dropped_before_barriers() -> int:
    """How many models were trained, and let go of, before the ranks met."""
    for _ in range(5):
        with sharded(2) as (job, *_):
            job.drop()
        del job, _
        gc.collect()
        dist.barrier()
    return 5


def gradients_in_a_child() -> str:
    """What a forked child raises that reads gradients which are on their way."""
    with sharded(2) as (job, model, optimizer):
        closure_of(job, model, optimizer, 2)()

        def look() -> str:
            return raised(lambda: model.module[0].weight.grad.sum(), bytesched.PluginError)

        found: str = in_child(look)
        optimizer.step()
    return found


def dropped_before_backward(job: Job) -> None:
    """Other optimizers take the place of one that was wrapped and let go of."""
    model = job.ddp(mlp())
    job.wrap(sgd(model), model)
    job.drop()
    first, *rest = model.parameters()
    one = job.wrap(torch.optim.AdamW([first], lr=0.01), model)
    other = job.wrap(torch.optim.SGD(rest, lr=0.1, momentum=0.9), model)
    train(job, model, one, after_step=lambda _: other.step(), zero_grad=model.zero_grad)
    job.record_state(model, one, other)


def adversaries(job: Job) -> None:
    """A GAN's usual loop: what the other one's loss leaves in a model is thrown away.

    Once before anything else, once in place, once when the next forward pass is over.
    """
    makes, judges = job.ddp(mlp()), job.ddp(nn.Sequential(nn.Linear(4, 37), nn.Linear(37, 1)))
    maker, judge = job.wrap(adamw(makes), makes), job.wrap(adamw(judges), judges)
    for step in range(9):
        if step % 3 < 2:
            judge.zero_grad(set_to_none=step % 3 == 0)
        made = makes(job.inputs(step))
        loss = judges(torch.cat([job.inputs(step, 4, 4), made.detach()])).square().mean()
        if step % 3 == 2:
            judge.zero_grad()
        loss.backward()
        job.record("norm", nn.utils.clip_grad_norm_(judges.parameters(), 0.1))
        judge.step()
        maker.zero_grad()
        judges(made).mean().backward()
        maker.step()
    job.record_state(makes, maker)
    judge.zero_grad()
    job.record_state(judges, judge)


def loaded(job: Job) -> None:
    model = job.ddp(mlp())
    plain = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    plain.zero_grad()
    content = plain.state_dict()
    optimizer = adamw(model)
    optimizer.load_state_dict(copy.deepcopy(content))
    job.wrap(optimizer, model)
    train(job, model, optimizer, steps=3)
    job.record("optimizer", optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(content))
    train(job, model, optimizer, steps=3)
    job.record_state(model, optimizer)


def entries_after_unwrap() -> tuple[int, bool]:
    """How many entries an optimizer has that is a plain one again, and whether it steps."""
    with sharded(3) as (job, model, optimizer):
        job.unwrap(optimizer)
        train(job, model, optimizer, steps=1)
        return len(optimizer.state), type(optimizer.state[next(model.parameters())]) is dict


def copied_and_pickled(job: Job) -> None:
    """Copies of an optimizer have what a plain one has, in that order, after `unwrap` too."""
    model = job.ddp(uneven())
    outside = nn.Parameter(torch.ones(3))
    optimizer = job.wrap(torch.optim.AdamW([outside, *model.parameters()], lr=0.01), model)
    train(job, model, optimizer, steps=3)

    def record(one: torch.optim.Optimizer) -> None:
        state = one.state_dict()
        job.record("optimizer", state)
        job.record("order", list(state["state"]))

    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    for copied in (copy.deepcopy(optimizer), torch.load(file, weights_only=False)):
        record(copied)
    job.record("size", len(optimizer.state))
    if job.rank == 1:
        # The other one goes on, as with state_dict().
        record(copy.deepcopy(optimizer))
    train(job, model, optimizer, steps=1, first_step=3)
    job.unwrap(optimizer)
    record(optimizer)


@bytesched.separable
class Averaging(torch.optim.SGD):
    """Has what it was before in its state, and goes back there in its `eval`, as some do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["before"] = parameter.detach().clone()
        return super().step(closure)

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "before" in self.state[parameter]:
                    parameter.copy_(self.state[parameter]["before"])


def state_of_others() -> dict[str, str]:
    """What uses of the optimizer's state raise where other ranks have a part of it."""
    make = lambda model: Averaging(model.parameters(), lr=0.1)  # noqa: E731
    with sharded(2, make=make) as (_, model, optimizer):
        own = [p for p in model.parameters() if dict.get(optimizer.state, p)]
        (foreign, *_) = [p for p in model.parameters() if all(p is not q for q in own)]
        uses: dict[str, Callable[[], object]] = {
            "eval": optimizer.eval,
            "read": lambda: optimizer.state[foreign],
            "looked for": lambda: foreign in optimizer.state,
            "written": lambda: optimizer.state.setdefault(foreign, {}),
            "all": lambda: [*optimizer.state.values()],
        }
        found = {"own": str([list(optimizer.state[p]) for p in own])}
        found |= {name: raised(use, bytesched.PluginError) for name, use in uses.items()}
    return found


def saved(path: str) -> None:
    with sharded(3, uneven) as (job, _, optimizer):
        if job.rank == 0:
            torch.save(optimizer.state_dict(), path)


@script(adamw, module=uneven)
def loaded_from(job: Job, model: Any, optimizer: Any, path: str) -> None:
    """Goes on from a checkpoint of another number of ranks."""
    optimizer.load_state_dict(torch.load(path))
    train(job, model, optimizer)


def bytes_held() -> tuple[int, int]:
    with sharded(2, uneven) as (_, model, optimizer):
        bytesched.flush(optimizer)
        entries = dict.values(optimizer.state)
        held = sum(v.nbytes for entry in entries for v in entry.values() if v.dim())
        return held, sum(2 * parameter.nbytes for parameter in model.parameters())


class SideBySide(nn.ModuleList):
    """The mean of all losses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x).square().mean() for part in self]).mean()


def cut_by_kind(job: Job) -> None:
    """A tensor of two owners, under every kind of kernel, deferred and in the script's thread."""
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"foreach": False, "amsgrad": True, "weight_decay": 0.1}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    ]
    model = job.ddp(SideBySide(uneven() for _ in kinds))
    optimizers = [
        job.wrap(kind(part.parameters(), lr=0.01, **arguments), model)
        for part, (kind, arguments) in zip(model.module, kinds, strict=True)
    ]
    for step in range(6):
        if step == 4:
            for optimizer in optimizers[::2]:
                optimizer.register_step_pre_hook(lambda *_: None)
        model.zero_grad()
        model(job.inputs(step)).backward()
        if step == 2:
            for parameter in model.module[1].parameters():
                parameter.grad = parameter.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    job.record_state(model, *optimizers)


@script(adamw, module=uneven, when="before_step")
def cut_and_clipped(job: Job, model: Any, optimizer: Any, step: int, kind: float = 2.0) -> None:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=kind)
    job.record(f"norm {step}", norm)
    if step % 2:
        nn.utils.clip_grad_value_(model.parameters(), 0.001)
    if step == 4:
        job.record("gradient", model.module[2].weight.grad)


@script(adamw, module=lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(7))))
def profiled(job: Job, model: Any, optimizer: Any) -> None:
    """A profiler starts and stops while messages are on their way, and one rank is late."""

    def clip(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        time.sleep(0.01 if step % 2 == job.rank else 0)

    turns = schedule(wait=1, warmup=1, active=3)
    with profile(activities=[ProfilerActivity.CPU], schedule=turns) as profiler:
        train(
            job,
            model,
            optimizer,
            steps=20,
            inputs=lambda step: job.inputs(step, 8, 32),
            before_step=clip,
            after_step=lambda _: profiler.step(),
        )


class Tied(nn.Module):
    """One large tensor is used at both ends; a layer is frozen, one is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(301, 8)
        self.middle = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.sometimes = nn.Linear(8, 8)
        self.out = nn.Linear(8, 301, bias=False)
        self.out.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.middle(self.words(words)))
        if words.sum() % 2:
            hidden = self.sometimes(hidden)
        out: torch.Tensor = self.out(hidden)
        return out


def cut_and_tied(job: Job) -> None:
    """With accumulation, a scale of the loss, a schedule, and groups that come later."""
    model = job.ddp(Tied(), find_unused_parameters=True)
    late = [*model.module.middle.parameters()]
    first = [p for p in model.parameters() if p.requires_grad and all(p is not q for q in late)]
    optimizer = job.wrap(torch.optim.AdamW(first, lr=0.01), model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)

    def loss_of(step: int) -> Any:
        generator = torch.Generator().manual_seed(100 * job.rank + step)
        return model(torch.randint(301, (3, 4), generator=generator)).square().mean()

    for step in range(STEPS):
        if step == 3:
            optimizer.add_param_group({"params": late, "lr": 0.1})
        optimizer.zero_grad()
        with model.no_sync():
            scaler.scale(loss_of(step)).backward()
        loss = loss_of(step + 50)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            job.record("norm", nn.utils.clip_grad_norm_(first, 0.1))
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        job.record(f"loss {step}", [loss, scaler.get_scale()])
        if step == 4:
            job.record("optimizer", optimizer.state_dict())
    job.record_state(model, optimizer)


def pictures(step: int) -> torch.Tensor:
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step))


def of_channels() -> nn.Sequential:
    """Most of its elements are in one layer, whose memory is not in the order of its dimensions."""
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.Conv2d(7, 41, 2), nn.Flatten(), nn.Linear(41, 3))
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model


def shards_saved(path: str) -> None:
    """Saves shards on every rank, and the whole state on one."""
    with sharded(3, of_channels, inputs=pictures) as (job, _, optimizer):
        save({"optimizer": bytesched.sharded_state(optimizer)}, checkpoint_id=path)
        if job.rank == 0:
            torch.save(optimizer.state_dict(), f"{path}/whole.pt")


def shards_loaded(path: str) -> dict[str, Any]:
    """What another number of ranks has, after two steps of its own, when it has loaded them."""
    with sharded(2, of_channels, partial(adamw, lr=0.5), pictures) as (*_, optimizer):
        load({"optimizer": bytesched.sharded_state(optimizer)}, checkpoint_id=path)
        state: dict[str, Any] = optimizer.state_dict()
    return state


def shards_loaded_plain(path: str) -> dict[str, Any]:
    """The same in a plain script, by torch's own means."""
    model = of_channels()
    optimizer = adamw(model, lr=0.5)
    content = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    load(content, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, content["optimizer"])
    state: dict[str, Any] = optimizer.state_dict()
    return state


def asked_while_others_wait(where: str) -> str:
    """What the first rank is told, which asks for a state while the others wait for it."""
    job = Job(wrapped=True, shard=True)
    first, second = job.ddp(mlp()), job.ddp(mlp())
    asked = job.wrap(adamw(first), first, timeout_s=1.0)
    other = job.wrap(adamw(second), second, timeout_s=100.0)
    train(job, first, asked, steps=2)
    backward(job, second, 0)
    said = raised(asked.state_dict) if job.rank == 0 else ""
    if where == "in another step":
        other.step()
    else:
        dist.all_reduce(torch.zeros(1))
    raised(lambda: job.unwrap(asked))
    job.close()
    return said


def refusals() -> dict[str, str]:
    """What is raised for uses that a sharded update does not have, with its message."""
    found: dict[str, str] = {}

    def note(what: str, use: Callable[[], object]) -> None:
        found[what] = raised(use)

    with sharded(0, uneven, lambda model: adamw(model.module[:-1])) as (job, model, optimizer):
        note("of another", lambda: bytesched.wrap(sgd(model), model))
        note("early shards", lambda: bytesched.sharded_state(optimizer).state_dict())
        train(job, model, optimizer, steps=2)
        note("late optimizer", lambda: bytesched.wrap(sgd(model.module[-1]), model))
        bytesched.flush(optimizer)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        note("nameless shards", lambda: bytesched.sharded_state(optimizer).state_dict())
        weight = model.module[2].weight
        weight.data = weight.data.t().contiguous().t()
        note("other strides", lambda: train(job, model, optimizer, steps=1))
    other = DistributedDataParallel(mlp())
    note("lbfgs", lambda: bytesched.wrap(torch.optim.LBFGS(other.parameters()), other, shard=True))
    note("named twice", lambda: bytesched.wrap(of_first_twice(other), other, shard=True))
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = nn.Parameter(first.weight.data)
    over = DistributedDataParallel(nn.Sequential(first, second))
    note("over one memory", lambda: bytesched.wrap(sgd(over), over, shard=True))
    return found
