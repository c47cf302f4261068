"""Scripts that nobody has touched, run plainly and then under the watch of `bytesched run`."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from dropped_models import settles
from rank_worker import resolve
from torch import Tensor, nn
from training import STEPS, Job, adamw, backward, differences, listening, mlp, script, sgd, train

import bytesched
from bytesched.plugins import left as reasons
from bytesched.plugins import registry
from bytesched.plugins.c10d import ddp
from bytesched.run.watch import watch
from bytesched.urgency import URGENCY

Case = Callable[[Job], None]


def optimizer_before_ddp(job: Job, times: int) -> None:
    """DDP is made so often."""
    module = mlp()
    optimizer = sgd(module)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3)
    for _ in range(times):
        model = job.ddp(module)
        train(job, model, optimizer, after_step=lambda _: schedule.step())
    job.record_state(model, optimizer)


class _Swapped(torch.autograd.Function):
    """Each rank has a part of what every other one had."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        swapped = torch.empty_like(x)
        dist.all_to_all_single(swapped, x)
        return swapped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        swapped = torch.empty_like(grads[0])
        work = dist.all_to_all_single(swapped, grads[0].contiguous(), async_op=True)
        assert work is not None
        work.wait()
        return swapped


class _Mixing(nn.Module):
    """Such a layer; or one by a functional collective, whose backward pass is another one."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.functional = functional

    def forward(self, x: Tensor) -> Any:
        if not self.functional:
            return _Swapped.apply(x)  # type: ignore[no-untyped-call]
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        group = dist.group.WORLD
        assert group is not None
        return all_to_all_single_autograd(x, None, None, group) + 0


def mixed_by_all_to_alls(job: Job, functional: bool) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), _Mixing(functional), nn.Linear(8, 8))
    model, optimizer = job.begin(adamw, layers)
    train(job, model, optimizer)
    job.record_state(model, optimizer)
    # Functional ones from torch 2.15 on.
    if job.wrapped and (not functional or hasattr(dist.ProcessGroup, "register_post_hook")):
        figures = bytesched.stats(optimizer)
        assert float(figures["urgent_sections"]) >= 2 * STEPS, figures
        # The last one may not have told yet that it is over.
        assert "0 sections" in repr(URGENCY) or "1 sections" in repr(URGENCY), URGENCY


def two_models(job: Job, of_one_optimizer: bool) -> None:
    models = [job.ddp(mlp()), job.ddp(mlp())]
    optimizers: list[Any] = [adamw(models[0]), sgd(models[1])]
    if of_one_optimizer:
        optimizers = [adamw(nn.ModuleList(models))]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(model(job.inputs(step)).square().mean() for model in models).backward()
        for optimizer in optimizers:
            optimizer.step()
    for model in models:
        job.record_state(model)


def two_optimizers(job: Job, what: str) -> None:
    """Each has one half of the model, and the second also something that is not in it.

    The first one is "replaced" in the middle, or the second one begins "late": when the first is
    wrapped, and nothing travels through DDP's own group any more.
    """
    module = mlp()
    temperature = nn.Parameter(torch.ones(()))
    model = job.ddp(module)
    parameters = list(module.parameters())
    first: torch.optim.Optimizer = torch.optim.SGD(parameters[:3], lr=0.1)
    second = torch.optim.AdamW([*parameters[3:], temperature], lr=0.01)
    for step in range(2 * STEPS):
        if step == STEPS and what == "replaced":
            first = torch.optim.Adagrad(parameters[:3], lr=0.1)
        first.zero_grad()
        second.zero_grad()
        (model(job.inputs(step)).square().mean() * temperature).backward()
        first.step()
        if step >= STEPS or what != "late":
            second.step()
    job.record_state(model, first, second)
    job.record("temperature", temperature)


def optimizers_in_turn(job: Job, turns: Sequence[int]) -> None:
    """Of two optimizers of all parameters, the one that steps seven times in each turn."""
    model = job.ddp(mlp())
    optimizers = [adamw(model), sgd(model)]
    for turn, number in enumerate(turns):
        train(job, model, optimizers[number], first_step=STEPS * turn)
    job.record_state(model, *(optimizers[number] for number in set(turns)))


def optimizer_inside_an_optimizer(job: Job) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = job.ddp(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    train(job, model, optimizer)
    job.record_state(model)


class Lookahead(torch.optim.Optimizer):
    """Never initialised, with some of the hooks that it would have; slow weights follow."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}
        self._patch_step_function()
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.defaults = optimizer.defaults
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        with torch.no_grad():
            for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)
        return loss


@script(adamw)
def lookahead(job: Job, model: Any, inner: Any) -> None:
    train(job, model, Lookahead(inner))


class Refusing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError


@script(adamw)
def another_optimizer_has_raised(job: Job, model: Any, optimizer: Any) -> None:
    refusing = Refusing([nn.Parameter(torch.ones(1))], lr=0.1)
    with contextlib.suppress(ZeroDivisionError):
        refusing.step()
    train(job, model, optimizer)
    del refusing


class Broken(torch.optim.SGD):
    """Cannot be wrapped, for a reason that nobody has thought of."""

    def register_step_post_hook(self, hook: Any) -> Any:
        raise ZeroDivisionError("no hooks here")


@script(lambda model: Broken(model.parameters(), lr=0.1))
def wrap_fails(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer)


@script(sgd)
def evaluated_counted_and_copied(job: Job, model: Any, optimizer: Any) -> None:
    """All this after the first step, so that the next forward pass is the one that counts."""
    from torch.utils.flop_counter import FlopCounterMode

    train(job, model, optimizer, steps=1)
    with torch.no_grad():
        job.record("output", model(job.inputs(0)))
    copied = copy.deepcopy(model.module)
    with FlopCounterMode(display=False) as flops:
        model(job.inputs(0))
    job.record("flops", flops.get_total_flops())
    torch.save(model, io.BytesIO())
    job.record("wrapped", len(registry.sessions()))
    train(job, model, optimizer, first_step=1)
    job.record("copy", copied.state_dict())


@script(sgd)
def compiled_later(job: Job, model: Any, optimizer: Any) -> None:
    job.kept.append(torch.compile(model, backend="eager"))
    train(job, job.kept[-1], optimizer)


@script(sgd)
def compiled_as_a_function(job: Job, model: Any, optimizer: Any) -> None:
    loss = torch.compile(lambda x: model(x).square().mean(), backend="eager")
    train(job, model, optimizer, loss=lambda step: loss(job.inputs(step)))


@script(partial(adamw, lr=torch.tensor(0.01)))
def optimizer_compiled(job: Job, model: Any, optimizer: Any) -> None:
    """A compiled step rounds differently from the one that would be run in its place."""

    @torch.compile(backend="aot_eager")
    def step() -> None:
        optimizer.step()

    train(job, model, optimizer, update=lambda _: step())


@script(adamw)
def wrapped_by_the_script(job: Job, model: Any, optimizer: Any, when: str, fields: Any) -> None:
    if when == "late":
        train(job, model, optimizer)
    if job.wrapped:
        bytesched.wrap(optimizer, model, **fields)
    train(job, model, optimizer)


class Special(nn.Parameter):
    """A parameter of the user's own class."""


def special() -> nn.Module:
    module = nn.Linear(8, 4)
    module.weight = Special(module.weight.detach())
    return module


@script(sgd, special)
def special_parameters(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer)


@script(sgd)
def inside_join(job: Job, model: Any, optimizer: Any) -> None:
    with model.join():
        train(job, model, optimizer, steps=STEPS + job.rank)


def stepped_inside_backward(job: Job) -> None:
    model = job.ddp(nn.Linear(8, 4))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step()) for p in optimizers
    ]
    for step in range(STEPS):
        model.zero_grad()
        backward(job, model, step)
    job.record_state(model)
    for handle in handles:
        handle.remove()


def never_trained(job: Job) -> None:
    model = job.ddp(mlp())
    backward(job, model, 0)
    job.record("gradient", model.module[0].weight.grad)


def no_ddp(job: Job) -> None:
    model = mlp()
    optimizer = adamw(model)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


@script(adamw, when="after_step")
def slow_first_step(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """One rank takes long over its first step, and the other over what comes after."""
    if job.wrapped and step == job.rank:
        time.sleep(2.0)


@script(adamw)
def state_made_by_one_rank(job: Job, model: Any, optimizer: Any) -> None:
    """As torch's checkpoints do where there is no state: not a first step."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    if job.rank:
        get_optimizer_state_dict(model.module, optimizer)
    optimizer.state.clear()
    train(job, model, optimizer)


@script(sgd)
def one_rank_differs(job: Job, model: Any, optimizer: Any, how: str) -> None:
    """It makes a step that changes nothing, has settings of its own, or cannot wrap its model.

    That is what it finds out by itself, or after all have agreed to wrap and have connected.
    """
    with contextlib.ExitStack() as stack:
        if job.rank and how == "steps before":
            optimizer.step()
        elif job.rank and how == "settings":
            stack.enter_context(mock.patch.dict(os.environ, {"BYTESCHED_POLICY": "fifo"}))
        elif job.rank and how == "hook":
            model._comm_hooks.append("one that changes nothing")
        elif job.rank and job.wrapped:
            error = AttributeError("no such hook")
            stack.enter_context(mock.patch.object(ddp, "add_optimizer", side_effect=error))
        train(job, model, optimizer)


def dropped(job: Job) -> None:
    """Nothing is left of a model that the script lets go of, with its optimizer."""

    def trained() -> list[weakref.ref[Any]]:
        model = job.ddp(mlp())
        optimizer = adamw(model)
        train(job, model, optimizer)
        job.record_state(model, optimizer)
        return [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.module[0].weight)]

    things = trained()
    job.kept.clear()
    job.record("gone", settles(lambda: not any(thing() is not None for thing in things)))


class WatchedJob(Job):
    """A job whose optimizers nobody wraps but who watches."""

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module, **fields: Any) -> Any:
        return optimizer


def run_all(
    cases: dict[str, tuple[tuple[str, str], tuple[Any, ...]]], watched: list[int] | None = None
) -> None:
    """Runs cases plainly, then watched, on some ranks alone or on all.

    Prints a line of JSON about each.

    Args:
        cases: where they are, and what they are given.
    """

    def case_at(address: tuple[str, str], args: tuple[Any, ...]) -> Case:
        return lambda job: resolve(address)(job, *args)

    run_both_ways({name: case_at(*case) for name, case in cases.items()}, WatchedJob, watched)


def run_both_ways(
    cases: dict[str, Case], kind: type[Job], watched: list[int] | None = None
) -> None:
    plain = {name: _job(kind, case, wrapped=False) for name, case in cases.items()}
    if watched is None or kind.own_rank() in watched:
        watch()
    for name, case in cases.items():
        with listening() as said:
            job = _job(kind, case, wrapped=True)
            entries = registry._entries.items()
            modes = [session.stats()["mode"] for session, e in entries for _ in e.optimizers]
            found = [
                line
                for (what, expected), (_, got) in zip(plain[name].records, job.records, strict=True)
                for line in differences(expected, got, what)
            ]
            _forget()
        print(json.dumps({"case": name, "modes": modes, "different": found, "said": said}))
        sys.stdout.flush()
        kind.barrier()


def _job(kind: type[Job], case: Case, *, wrapped: bool) -> Job:
    job = kind(wrapped=wrapped)
    case(job)
    return job


def _forget() -> None:
    """As at the end of a script."""
    from bytesched.plugins.script import intercept

    intercept.say_undecided()
    for session in registry.sessions():
        registry.unwrap(session.root)
    intercept._models.clear()
    reasons._left.clear()
