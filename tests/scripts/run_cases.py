"""Scripts that nobody has touched, run plainly and then under the watch of `bytesched run`."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from dropped_models import settles
from torch import Tensor, nn
from training import STEPS, Job, adamw, differences, mlp, sgd, train

import bytesched
from bytesched.plugins import left as reasons
from bytesched.plugins import registry
from bytesched.plugins.c10d import ddp
from bytesched.run.watch import watch
from bytesched.urgency import URGENCY

Case = Callable[[Job], None]


def optimizer_after_ddp(job: Job) -> None:
    model = job.ddp(mlp())
    optimizer = adamw(model)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def optimizer_before_ddp(job: Job) -> None:
    module = mlp()
    optimizer = sgd(module)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3)
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


class _Swapping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        swapped: Tensor = _Swapped.apply(x)  # type: ignore[no-untyped-call]
        return swapped


def mixed_by_all_to_alls(job: Job) -> None:
    model = job.ddp(nn.Sequential(nn.Linear(8, 8), _Swapping(), nn.Linear(8, 8)))
    optimizer = adamw(model)
    train(job, model, optimizer)
    job.record_state(model, optimizer)
    if job.wrapped:
        figures = bytesched.stats(optimizer)
        assert float(figures["urgent_sections"]) >= 2 * STEPS, figures
        # The last one may not have told yet that it is over.
        assert "0 sections" in repr(URGENCY) or "1 sections" in repr(URGENCY), URGENCY


class _Exchanging(nn.Module):
    """As `_Swapping`, by a functional collective, whose backward pass is another one."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        group = dist.group.WORLD
        assert group is not None
        return all_to_all_single_autograd(x, None, None, group) + 0


def mixed_by_functional_all_to_alls(job: Job) -> None:
    model = job.ddp(nn.Sequential(nn.Linear(8, 8), _Exchanging(), nn.Linear(8, 8)))
    optimizer = adamw(model)
    train(job, model, optimizer)
    job.record_state(model, optimizer)
    # From torch 2.15 on.
    if job.wrapped and hasattr(dist.ProcessGroup, "register_post_hook"):
        figures = bytesched.stats(optimizer)
        assert float(figures["urgent_sections"]) >= 2 * STEPS, figures


def two_models(job: Job) -> None:
    models = [job.ddp(mlp()), job.ddp(mlp())]
    optimizers = [adamw(models[0]), sgd(models[1])]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(job.inputs(step)).square().mean().backward()
            optimizer.step()
    for model, optimizer in zip(models, optimizers, strict=True):
        job.record_state(model, optimizer)


def two_models_of_one_optimizer(job: Job) -> None:
    models = [job.ddp(mlp()), job.ddp(mlp())]
    optimizer = adamw(nn.ModuleList(models))
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(model(job.inputs(step)).square().mean() for model in models).backward()
        optimizer.step()
    for model in models:
        job.record_state(model)


def two_optimizers(job: Job) -> None:
    """Each has one half of the model, and the second also something that is not in it."""
    module = mlp()
    temperature = nn.Parameter(torch.ones(()))
    model = job.ddp(module)
    parameters = list(module.parameters())
    first = torch.optim.SGD(parameters[:3], lr=0.1)
    second = torch.optim.AdamW([*parameters[3:], temperature], lr=0.01)
    for step in range(STEPS):
        first.zero_grad()
        second.zero_grad()
        (model(job.inputs(step)).square().mean() * temperature).backward()
        first.step()
        second.step()
    job.record_state(model, first, second)
    job.record("temperature", temperature)


def another_optimizer_is_never_used(job: Job) -> None:
    model = job.ddp(mlp())
    optimizers = [sgd(model), adamw(model)]
    train(job, model, optimizers[1])
    job.record_state(model, *optimizers)


def a_new_optimizer_in_the_middle(job: Job) -> None:
    model = job.ddp(mlp())
    optimizer: torch.optim.Optimizer = adamw(model)
    train(job, model, optimizer)
    optimizer = sgd(model)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def one_of_two_optimizers_is_replaced(job: Job) -> None:
    model = job.ddp(mlp())
    parameters = list(model.parameters())
    first: torch.optim.Optimizer = torch.optim.SGD(parameters[:3], lr=0.1)
    second = torch.optim.AdamW(parameters[3:], lr=0.01)
    for step in range(2 * STEPS):
        if step == STEPS:
            first = torch.optim.Adagrad(parameters[:3], lr=0.1)
        first.zero_grad()
        second.zero_grad()
        model(job.inputs(step)).square().mean().backward()
        first.step()
        second.step()
    job.record_state(model, first, second)


def optimizers_take_turns(job: Job) -> None:
    model = job.ddp(mlp())
    optimizers = [adamw(model), sgd(model)]
    for step in range(2 * STEPS):
        train(job, model, optimizers[step % 2], first_step=step, steps=1)
    job.record_state(model, *optimizers)


def ddp_made_again(job: Job) -> None:
    module = mlp()
    for _ in range(2):
        model = job.ddp(module)
        optimizer = adamw(module)
        train(job, model, optimizer)
    job.record_state(model, optimizer)


def optimizer_inside_an_optimizer(job: Job) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = job.ddp(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    train(job, model, optimizer)
    job.record_state(model)


class Proxy(torch.optim.Optimizer):
    """An optimizer in name only, as trainers have them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def proxy_of_an_optimizer(job: Job) -> None:
    model = job.ddp(mlp())
    optimizer = adamw(model)
    train(job, model, Proxy(optimizer))
    job.record_state(model, optimizer)


def forward_inside_step(job: Job) -> None:
    model = job.ddp(mlp())
    optimizer = adamw(model)
    for step in range(STEPS):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = model(job.inputs(step)).square().mean()
            loss.backward()
            return loss

        job.record("loss", optimizer.step(closure))
    job.record_state(model, optimizer)


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


def lookahead(job: Job) -> None:
    model = job.ddp(mlp())
    inner = adamw(model)
    optimizer = Lookahead(inner)
    train(job, model, optimizer)
    job.record_state(model, inner)


class Broken(torch.optim.SGD):
    """Cannot be wrapped, for a reason that nobody has thought of."""

    def register_step_post_hook(self, hook: Any) -> Any:
        raise ZeroDivisionError("no hooks here")


def wrap_fails(job: Job) -> None:
    model = job.ddp(mlp())
    optimizer = Broken(model.parameters(), lr=0.1)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def first_forward_in_no_sync(job: Job) -> None:
    model = job.ddp(mlp())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            model(job.inputs(step)).square().mean().backward()
        model(job.inputs(step + STEPS)).square().mean().backward()
        optimizer.step()
    job.record_state(model, optimizer)


def evaluated_counted_and_copied(job: Job) -> None:
    """All this after the first step, so that the next forward pass is the one that counts."""
    from torch.utils.flop_counter import FlopCounterMode

    model = job.ddp(mlp())
    optimizer = sgd(model)
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
    job.record_state(model, optimizer)
    job.record("copy", copied.state_dict())


def compiled_later(job: Job) -> None:
    ddp = job.ddp(mlp())
    model = torch.compile(ddp, backend="eager")
    job.kept.append(model)
    optimizer = sgd(ddp)
    train(job, model, optimizer)
    job.record_state(ddp, optimizer)


def compiled_as_a_function(job: Job) -> None:
    model = job.ddp(mlp())
    optimizer = sgd(model)

    @torch.compile(backend="eager")
    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(job.inputs(step)).backward()
        optimizer.step()
    job.record_state(model, optimizer)


def optimizer_compiled(job: Job) -> None:
    """A compiled step rounds differently from the one that would be run in its place."""
    model = job.ddp(mlp())
    optimizer = adamw(model, lr=torch.tensor(0.01))

    @torch.compile(backend="aot_eager")
    def step() -> None:
        optimizer.step()

    for number in range(STEPS):
        optimizer.zero_grad()
        model(job.inputs(number)).square().mean().backward()
        step()
    job.record_state(model)


def wrapped_by_the_script(job: Job) -> None:
    model = job.ddp(mlp())
    optimizer = adamw(model)
    if job.wrapped:
        bytesched.wrap(optimizer, model, policy="fifo")
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def wrapped_late_by_the_script(job: Job) -> None:
    model = job.ddp(mlp())
    optimizer = adamw(model)
    train(job, model, optimizer)
    if job.wrapped:
        bytesched.wrap(optimizer, model)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def declined_by_the_script(job: Job) -> None:
    model = job.ddp(mlp())
    optimizer = adamw(model)
    if job.wrapped:
        bytesched.wrap(optimizer, model, enabled=False)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def sparse_gradients(job: Job) -> None:
    model = job.ddp(nn.Embedding(16, 4, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.arange(4) + job.rank
    train(job, model, optimizer, inputs=lambda _: inputs)
    job.record_state(model)


class Special(nn.Parameter):
    """A parameter of the user's own class."""


def special_parameters(job: Job) -> None:
    module = nn.Linear(8, 4)
    module.weight = Special(module.weight.detach())
    model = job.ddp(module)
    optimizer = sgd(model)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def inside_join(job: Job) -> None:
    model = job.ddp(mlp())
    optimizer = sgd(model)
    with model.join():
        train(job, model, optimizer, steps=STEPS)
        if job.rank:
            train(job, model, optimizer, first_step=STEPS, steps=1)
    job.record_state(model)


def stepped_inside_backward(job: Job) -> None:
    model = job.ddp(nn.Linear(8, 4))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step()) for p in optimizers
    ]
    for step in range(STEPS):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        model(job.inputs(step)).square().mean().backward()
    job.record_state(model)
    for handle in handles:
        handle.remove()


def never_trained(job: Job) -> None:
    model = job.ddp(mlp())
    model(job.inputs(0)).square().mean().backward()
    job.record("gradient", model.module[0].weight.grad)


def no_ddp(job: Job) -> None:
    model = mlp()
    optimizer = adamw(model)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def second_optimizer_begins_later(job: Job) -> None:
    """When the first is wrapped, and nothing travels through DDP's own group any more."""
    module = mlp()
    model = job.ddp(module)
    parameters = list(module.parameters())
    first = torch.optim.SGD(parameters[:3], lr=0.1)
    second = torch.optim.AdamW(parameters[3:], lr=0.01)
    for step in range(2 * STEPS):
        first.zero_grad()
        second.zero_grad()
        model(job.inputs(step)).square().mean().backward()
        first.step()
        if step >= STEPS:
            second.step()
    job.record_state(model, first, second)


def slow_first_step(job: Job) -> None:
    """One rank takes long over its first step, and the other over what comes after."""
    model = job.ddp(mlp())
    optimizer = adamw(model)

    def late(step: int) -> None:
        if job.wrapped and step == job.rank:
            time.sleep(2.0)

    train(job, model, optimizer, after_step=late)
    job.record_state(model, optimizer)


def state_made_by_one_rank(job: Job) -> None:
    """As torch's checkpoints do where there is no state: not a first step."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    module = mlp()
    model = job.ddp(module)
    optimizer = adamw(model)
    if job.rank:
        get_optimizer_state_dict(module, optimizer)
    optimizer.state.clear()
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def one_rank_steps_before(job: Job) -> None:
    """A step of the script's own that changes nothing, on one rank alone."""
    model = job.ddp(mlp())
    optimizer = sgd(model)
    if job.rank:
        optimizer.step()
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def one_rank_has_other_settings(job: Job) -> None:
    model = job.ddp(mlp())
    optimizer = sgd(model)
    own = {"BYTESCHED_POLICY": "fifo"} if job.rank else {}
    with mock.patch.dict(os.environ, own):
        train(job, model, optimizer)
    job.record_state(model, optimizer)


def one_rank_leaves_it(job: Job) -> None:
    """Its model cannot be wrapped, which that rank finds out by itself."""
    model = job.ddp(mlp())
    optimizer = sgd(model)
    if job.rank:
        model._comm_hooks.append("one that changes nothing")
    train(job, model, optimizer)
    job.record_state(model, optimizer)


def wrap_fails_on_one_rank(job: Job) -> None:
    """After all have agreed to wrap, and after they have connected."""
    model = job.ddp(mlp())
    optimizer = sgd(model)
    broken = mock.patch.object(ddp, "add_optimizer", side_effect=AttributeError("no such hook"))
    with broken if job.wrapped and job.rank else contextlib.nullcontext():
        train(job, model, optimizer)
    job.record_state(model, optimizer)


def around_ddp_everywhere(job: Job) -> None:
    """Squares of each rank's own gradients, and inputs made worse by passes around DDP."""
    model = job.ddp(mlp())
    optimizer = adamw(model)
    for step in range(2 * STEPS):
        x = job.inputs(step)
        for _ in range(2):
            x = x.detach().requires_grad_()
            model.module(x).square().mean().backward()
            assert x.grad is not None
            x = x + 0.1 * x.grad.sign()
        train(job, model, optimizer, first_step=step, steps=1)
        optimizer.zero_grad()
        model.module(x.detach()).square().mean().backward()
        job.record("squares", [p.grad.square().sum() for p in model.parameters()])
    job.record_state(model, optimizer)


def around_ddp_on_one_rank(job: Job) -> None:
    model = job.ddp(mlp())
    optimizer = adamw(model)

    def probe(step: int) -> None:
        if step % 4 == 3 and job.rank == 0:
            x = job.inputs(100 + step).requires_grad_()
            model.module(x)[0, 0].backward()
            job.record("saliency", x.grad)
            model.zero_grad()
        if step > STEPS:
            job.barrier()

    train(job, model, optimizer, steps=2 * STEPS, after_step=probe)
    job.record_state(model, optimizer)


def frozen_when_wrapped(job: Job) -> None:
    """A layer that DDP averages is thawed when the others have been trained for a while."""
    module = mlp()
    model = job.ddp(module, find_unused_parameters=True)
    module[2].requires_grad_(False)
    optimizer = adamw(model)
    train(job, model, optimizer)
    module[2].requires_grad_(True)
    train(job, model, optimizer, first_step=STEPS)
    job.record_state(model, optimizer)


def shared_encoder(job: Job) -> None:
    """Two DDPs over one encoder; only the first one's optimizer has it."""
    encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    models = [job.ddp(nn.Sequential(encoder, nn.Linear(8, width))) for width in (1, 4)]
    optimizers = [adamw(models[0]), adamw(models[1].module[1])]
    for step in range(2 * STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(job, model, optimizer, first_step=step, steps=1)
    for model, optimizer in zip(models, optimizers, strict=True):
        job.record_state(model, optimizer)


def put_into_a_new_ddp(job: Job) -> None:
    """After a checkpoint was loaded; the old one is still there."""
    module = mlp()
    for turn in range(2):
        model = job.ddp(module)
        model.module.load_state_dict(copy.deepcopy(module.state_dict()))
        optimizer = adamw(model)
        train(job, model, optimizer, first_step=turn * STEPS)
    job.record_state(model, optimizer)


def forward_called_by_name(job: Job) -> None:
    """In turn with a call of the model, and inside no_sync() for the first of two passes."""
    model = job.ddp(mlp())
    optimizer = sgd(model)
    for step in range(4 * STEPS):
        call = model if step % 3 == 0 else model.forward
        with contextlib.nullcontext() if step % 2 else model.no_sync():
            loss = call(job.inputs(step)).square().mean()
            loss.backward()
        job.record("loss", loss)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    job.record_state(model, optimizer)


def hook_registered_later(job: Job) -> None:
    """When the model is wrapped already: from then on DDP compresses."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = job.ddp(mlp())
    optimizer = adamw(model)
    train(job, model, optimizer)
    model.register_comm_hook(None, fp16_compress_hook)
    train(job, model, optimizer, first_step=STEPS)
    job.record_state(model, optimizer)


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


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        optimizer_after_ddp,
        optimizer_before_ddp,
        mixed_by_all_to_alls,
        mixed_by_functional_all_to_alls,
        two_models,
        two_models_of_one_optimizer,
        two_optimizers,
        another_optimizer_is_never_used,
        a_new_optimizer_in_the_middle,
        one_of_two_optimizers_is_replaced,
        optimizers_take_turns,
        ddp_made_again,
        optimizer_inside_an_optimizer,
        proxy_of_an_optimizer,
        forward_inside_step,
        lookahead,
        wrap_fails,
        first_forward_in_no_sync,
        evaluated_counted_and_copied,
        compiled_later,
        compiled_as_a_function,
        optimizer_compiled,
        wrapped_by_the_script,
        wrapped_late_by_the_script,
        declined_by_the_script,
        sparse_gradients,
        special_parameters,
        inside_join,
        stepped_inside_backward,
        never_trained,
        no_ddp,
        second_optimizer_begins_later,
        slow_first_step,
        state_made_by_one_rank,
        one_rank_steps_before,
        one_rank_has_other_settings,
        one_rank_leaves_it,
        wrap_fails_on_one_rank,
        around_ddp_everywhere,
        around_ddp_on_one_rank,
        frozen_when_wrapped,
        shared_encoder,
        put_into_a_new_ddp,
        forward_called_by_name,
        hook_registered_later,
        dropped,
    )
}


class Said(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run_all(names: list[str]) -> None:
    """Runs cases plainly, then watched, and prints a line of JSON about each."""
    run_both_ways({name: CASES[name] for name in names}, Job)


def run_some(name: str, watched: list[int]) -> None:
    """Runs a case plainly, then watched on some ranks alone, and prints a line of JSON about it."""
    run_both_ways({name: CASES[name]}, Job, watched)


def run_both_ways(
    cases: dict[str, Case], kind: type[Job], watched: list[int] | None = None
) -> None:
    plain = {name: _job(kind, case, wrapped=False) for name, case in cases.items()}
    if watched is None or kind.own_rank() in watched:
        watch()
    said = Said()
    logging.getLogger("bytesched").addHandler(said)
    for name, case in cases.items():
        said.lines.clear()
        job = _job(kind, case, wrapped=True)
        modes = [entry.session.stats()["mode"] for entry in registry._entries]
        found = [
            line
            for (what, expected), (_, got) in zip(plain[name].records, job.records, strict=True)
            for line in differences(expected, got, what)
        ]
        _forget()
        print(json.dumps({"case": name, "modes": modes, "different": found, "said": said.lines}))
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
