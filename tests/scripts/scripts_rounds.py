"""Scripts about what DDP decides: what a round is, whose gradients, when settings change.

What they share with all training is in the other ``scripts_*``, which run in the same ways.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from raised import raised
from rank_worker import resolve
from scripts_models import Branching
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from training import Job, adamw, backward, gradients, listening, script, sgd, train

import bytesched
from bytesched.errors import PluginError
from bytesched.plugins.c10d import ddp as ddps
from bytesched.plugins.planned import ddp_session

STEPS = 8


def layers(count: int = 4) -> nn.Sequential:
    pairs = [(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair), nn.Linear(8, 8))


def reduced_if(model: Any, is_reduced: bool) -> Any:
    return contextlib.nullcontext() if is_reduced else model.no_sync()


# -- what is a round -----------------------------------------------------------------------


@script(adamw, layers, when="step", steps=STEPS)
def called_around(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Two of three passes go around DDP, whose gradients stay this rank's own."""
    optimizer.zero_grad()
    job.record("loss", backward(job, model.module if step % 3 else model, step))
    optimizer.step()
    job.record("gradients", gradients(model))


@script(adamw, layers, when="after_step", steps=STEPS)
def probed_everywhere(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """A batch through the module after each step, for the squares of its gradients."""
    optimizer.zero_grad()
    backward(job, model.module, 50 + step)
    job.record("squares", [p.grad.square().sum() for p in model.parameters()])


@script(adamw, layers, when="before_step", steps=STEPS)
def probed_before_the_step(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """The same between backward() and step(), so that both gradients are added up."""
    if step % 2:
        backward(job, model.module, 50 + step)


@script(adamw, layers, when="step", steps=STEPS)
def attacked(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Inputs that two passes around DDP have made worse."""
    x: Any = job.inputs(step)
    for _ in range(2):
        x = x.detach().requires_grad_()
        model.module(x).square().mean().backward()
        x = x + 0.1 * x.grad.sign()
    optimizer.zero_grad()
    model(x.detach()).square().mean().backward()
    optimizer.step()


@script(adamw, layers, when="after_step", steps=STEPS)
def probed_on_one_rank(job: Job, model: Any, optimizer: Any, step: int, barrier: bool) -> None:
    """The first rank looks at gradients of its own between two steps."""
    if step % 3 == 2 and job.rank == 0:
        x = job.inputs(50 + step).requires_grad_()
        model.module(x)[0, 0].backward()
        job.record("saliency", x.grad)
        job.record("gradients", gradients(model))
        model.zero_grad()
    if barrier:
        job.barrier()


@script(adamw, layers, when="step", steps=3 * STEPS)
def forward_called(job: Job, model: Any, optimizer: Any, step: int, mixed: bool) -> None:
    is_last = step % 3 == 2
    with reduced_if(model, is_last):
        called = model if mixed and step % 2 == 0 else model.forward
        job.record("loss", backward(job, called, step))
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
    elif step < 9:
        job.record("own gradients", gradients(model))


@script(sgd, layers, when="passes", steps=STEPS)
def forward_for_a_look(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """A forward pass before each step that no backward pass follows, and then accumulation."""
    job.record("looked", model(job.inputs(200 + step)).argmax(-1))
    with model.no_sync():
        backward(job, model, 100 + step)
    job.record("loss", backward(job, model, step))


@script(sgd, layers, when="step", steps=STEPS)
def two_backwards(job: Job, model: Any, optimizer: Any, step: int) -> None:
    output = model(job.inputs(step))
    output.square().mean().backward(retain_graph=True)
    output.abs().mean().backward()
    optimizer.step()
    if step % 2:
        optimizer.zero_grad()
    one, other = model(job.inputs(100 + step)), model(job.inputs(200 + step))
    one.square().mean().backward()
    other.square().mean().backward()
    if step % 3 == 0:
        job.record("gradients", gradients(model))
    optimizer.step()
    optimizer.zero_grad()
    job.record("output", output)


@script(adamw, layers, when="loss", steps=STEPS)
def several_forwards(job: Job, model: Any, optimizer: Any, step: int) -> Any:
    """Three forward passes, one of them without DDP's sums, and one backward pass."""
    with reduced_if(model, step % 2 == 0):
        output = model(job.inputs(step))
    output = output + model(job.inputs(100 + step)) * model(job.inputs(200 + step))
    return output.square().mean()


def normalised() -> nn.Module:
    """Buffers that the first rank sends to all before each forward pass."""
    return nn.Sequential(layers(1), nn.BatchNorm1d(8), nn.ReLU(), layers(1))


def accumulated_with(job: Job, what: str) -> None:
    """Under no_sync, with what DDP does as a forward pass begins, or learns from the first one."""
    kinds: dict[str, Callable[[], nn.Module]] = {"unused": Branching, "static": layers}
    module: Any = kinds.get(what, normalised)()
    if what == "unused":
        module.register_buffer("seen", torch.zeros(1))
    model, optimizer = job.begin(
        sgd, module, find_unused_parameters=what == "unused", static_graph=what == "static"
    )
    for step in range(STEPS):
        passes = 3 + (job.rank + step) % 2 if what == "unequal" else 3
        for micro in range(passes if step or what != "static" else 1):
            is_last = micro == passes - 1 or (what == "static" and not step)
            if what == "unused":
                module.turn = "left" if micro == 0 else "right"
            with reduced_if(model, is_last):
                backward(job, model, 10 * step + micro)
        job.record("gradients", gradients(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    job.record_state(model, optimizer)


class _Failing(torch.autograd.Function):
    """Its backward pass ends before the first gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise KeyError("the script's own")


@script(adamw, layers)
def exception_caught(job: Job, model: Any, optimizer: Any) -> None:
    """A backward pass that fails in front of the model, on all ranks, and is tried again."""

    def inputs(step: int) -> Tensor:
        if step % 3 == 2:
            output: Any = _Failing.apply(model(job.inputs(100 + step)))  # type: ignore[no-untyped-call]
            with contextlib.suppress(KeyError):
                output.sum().backward()
        return job.inputs(step)

    train(job, model, optimizer, steps=STEPS, inputs=inputs)


class Recomputed(nn.Module):
    """Its first layer is used in several checkpoints, each of which is a pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.times = 2

    def forward(self, x: Tensor) -> Any:
        x = x.clone().requires_grad_()
        for _ in range(self.times):
            x = checkpoint(self.first, x, use_reentrant=True).tanh()
        return self.last(x)


@script(adamw, Recomputed)
def checkpointed_twice(job: Job, model: Any, optimizer: Any) -> None:
    """The first of these passes ends the round, and the second one adds to gradients."""
    train(job, model, optimizer, steps=STEPS)


def checkpointed_twice_later(kind: type[Job]) -> str:
    """What is raised when that begins in the course of the training."""
    job = kind(wrapped=True)
    model, optimizer = job.begin(sgd, Recomputed)
    model.module.times = 1
    train(job, model, optimizer, steps=5)
    model.module.times = 2
    said = raised(lambda: train(job, model, optimizer, first_step=5), PluginError)
    raised(job.close, PluginError)
    return said


# -- whose gradients -----------------------------------------------------------------------


def frozen(job: Job, averaged: bool, when: str) -> None:
    """A layer that DDP averages or not, as it was when DDP was made, is frozen until later."""
    module = layers()
    module[2].requires_grad_(averaged)
    model = job.ddp(module, find_unused_parameters=averaged)
    module[2].requires_grad_(when == "before wrap")
    optimizer = job.wrap(adamw(model), model)
    train(job, model, optimizer, steps=4)
    module[2].requires_grad_(True)
    train(job, model, optimizer, steps=STEPS, first_step=4)
    job.record("gradients", gradients(model))
    job.record_state(model, optimizer)


class Headed(nn.Module):
    """An encoder that others have too, and a head of its own."""

    def __init__(self, encoder: nn.Module, outputs: int, *, detached: bool = False) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(8, outputs)
        self.detached = detached

    def forward(self, x: Tensor) -> Any:
        encoded = self.encoder(x)
        return self.head(encoded.detach() if self.detached else encoded)


def shared_encoder(job: Job, stepped: str) -> None:
    """Two DDPs and two optimizers over one encoder, which one of them steps, or both."""
    encoder = layers(2)
    is_detached = stepped == "by one, detached"
    one = job.ddp(Headed(encoder, 1))
    other = job.ddp(Headed(encoder, 4, detached=is_detached), find_unused_parameters=is_detached)
    of_other = other.module if stepped == "by both" else other.module.head
    make: Any = sgd if stepped == "by both" else adamw
    trained = [(one, job.wrap(make(one), one)), (other, job.wrap(make(of_other), other))]
    for step in range(STEPS):
        for model, optimizer in trained:
            loss = model(job.inputs(step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.record("loss", loss)
    for model, optimizer in trained:
        job.record_state(model, optimizer)


def nested(job: Job) -> None:
    """A DDP inside of another one: gradients are averaged by both.

    Not as views: then plain DDP, too, raises or averages what it finds.
    """
    inner = job.ddp(layers(2), gradient_as_bucket_view=False)
    model, optimizer = job.begin(
        adamw, nn.Sequential(inner, nn.Tanh(), nn.Linear(8, 8)), gradient_as_bucket_view=False
    )
    train(job, model, optimizer, steps=STEPS)
    job.record_state(model, optimizer)


def rewrapped(job: Job, old: str) -> None:
    """After some steps the model, now all of it, comes into a new DDP, and gets a new optimizer.

    The old ones are "kept", "dropped" or "unwrapped".
    """
    module = layers()
    module[0].requires_grad_(old != "unwrapped")
    first = job.ddp(module)
    optimizer = job.wrap(adamw(first), first)
    train(job, first, optimizer, steps=STEPS)
    saved = copy.deepcopy(module.state_dict())
    if old == "unwrapped":
        job.unwrap(optimizer)
        module[0].requires_grad_(True)
    elif old == "dropped":
        del first
        job.drop()
        job.kept.clear()
    second = job.ddp(module)
    second.module.load_state_dict(saved)
    optimizer = job.wrap(adamw(second), second)
    train(job, second, optimizer, steps=STEPS, first_step=STEPS)
    job.record_state(second, optimizer)


def own_group(job: Job) -> None:
    """Of all; four ranks are two trainings side by side, each of two."""
    world = list(range(dist.get_world_size()))
    groups = [world[:2], world[2:]] if len(world) == 4 else [world]
    group = [dist.new_group(ranks) for ranks in groups][job.rank // 2 if len(groups) > 1 else 0]
    model, optimizer = job.begin(adamw, layers, process_group=group)
    train(job, model, optimizer, steps=STEPS)
    job.record_state(model, optimizer)


# -- backward passes beside the model's ----------------------------------------------------


def squares(parameters: Iterable[Tensor]) -> Any:
    return 0.1 * sum(p.square().sum() for p in parameters)


@script(adamw, layers)
def regularised_beside(job: Job, model: Any, optimizer: Any, to_none: bool) -> None:
    """Between backward() and step(), of the weights alone."""

    def regularise(_: int) -> None:
        squares(model.module.parameters()).backward()

    zero_grad = partial(optimizer.zero_grad, set_to_none=to_none)
    train(job, model, optimizer, steps=STEPS, before_step=regularise, zero_grad=zero_grad)


@script(adamw, layers, when="before_step", steps=STEPS)
def submodule_beside(job: Job, model: Any, optimizer: Any, step: int) -> None:
    backward(job, model.module[4], 50 + step)


@script(partial(sgd, momentum=0.0), layers, when="passes", steps=STEPS)
def built_before_and_run_after(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """A graph of the weights from before the forward pass, run when gradients are under way."""
    penalty = squares(model.module.parameters())
    job.record("loss", backward(job, model, step))
    penalty.backward()


@script(adamw, layers)
def grad_taken_beside(job: Job, model: Any, optimizer: Any) -> None:
    """`torch.autograd.grad` between backward() and step(), and after it."""

    def take(step: int) -> None:
        loss = model.module(job.inputs(50 + step)).square().mean()
        job.record("taken", torch.autograd.grad(loss, list(model.parameters())))

    train(job, model, optimizer, steps=STEPS, before_step=take, after_step=take)


# -- settings that change ------------------------------------------------------------------


@script(adamw, layers, wraps=False)
def hook_registered(job: Job, model: Any, optimizer: Any, kind: str, first: int) -> None:
    """After ``first`` steps under wrap, or before it if negative: DDP compresses from then on."""
    calls: list[int] = []

    # DDP looks at annotations, which are texts in this file.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        calls.append(bucket.index())
        return fp16_compress_hook(state, bucket)

    if first >= 0:
        job.wrap(optimizer, model)
        train(job, model, optimizer, steps=first)
    if kind == "builtin":
        c10d: Any = dist
        model._register_builtin_comm_hook(c10d.BuiltinCommHookType.FP16_COMPRESS)
    else:
        model.register_comm_hook(None, hook)
    if first < 0:
        job.wrap(optimizer, model)
    train(job, model, optimizer, steps=STEPS, first_step=10)
    # How often depends on the buckets, of which a new reducer has others in its first round.
    job.record("was called", bool(calls) or kind == "builtin")


def in_a_context(job: Job, first: int) -> None:
    """After ``first`` steps, gradients would go to a context of distributed autograd."""
    model = job.ddp(layers())
    with mock.patch.object(ddps, "are_in_a_context", return_value=not first):
        optimizer = job.wrap(adamw(model), model)
    train(job, model, optimizer, steps=first)
    with mock.patch.object(ddp_session, "are_in_a_context", return_value=True):
        train(job, model, optimizer, steps=STEPS, first_step=first)
    job.record_state(model, optimizer)


def begun_over_nccl(job: Job, what: str) -> None:
    """As far as `wrap` knows: there is no GPU."""
    model = job.ddp(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), layers(1)))
    if what == "SyncBatchNorm":
        # DDP itself takes none on the CPU, where it does not synchronize.
        model.module[1] = nn.SyncBatchNorm(8, affine=False).eval()
    else:
        model._register_buffer_comm_hook(model, averaged_buffers)
    with mock.patch.object(ddps, "kind_of", return_value="nccl"):
        optimizer = job.wrap(adamw(model), model)
    train(job, model, optimizer, steps=STEPS)
    job.record_state(model, optimizer)


def averaged_buffers(model: Any, buffers: dict[str, Tensor]) -> list[Any]:
    floating = [buffer for buffer in buffers.values() if buffer.is_floating_point()]
    return [dist.all_reduce(buffer, async_op=True).get_future() for buffer in floating]


def over_another_back_end() -> str:
    """What `wrap` raises for a group of a back end that sends nothing."""
    # It becomes one by that.
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    model = DistributedDataParallel(layers(), process_group=dist.new_group(backend="fake"))
    return raised(lambda: bytesched.wrap(sgd(model), model))


@script(sgd, layers, wraps=False)
def unwrapped_and_wrapped(job: Job, model: Any, optimizer: Any) -> None:
    for turn in range(3):
        job.wrap(optimizer, model)
        train(job, model, optimizer, steps=STEPS, first_step=2 * turn * STEPS)
        job.unwrap(optimizer)
        job.record("gradients", gradients(model))
        train(job, model, optimizer, steps=3, first_step=(2 * turn + 1) * STEPS)


@script(sgd, layers, wraps=False)
def wrapped_in_the_middle(job: Job, model: Any, optimizer: Any, to_none: bool) -> None:
    zero_grad = partial(optimizer.zero_grad, set_to_none=to_none)
    train(job, model, optimizer, steps=3, zero_grad=zero_grad)
    job.wrap(optimizer, model)
    train(job, model, optimizer, steps=STEPS, first_step=3, zero_grad=zero_grad)


def optimizer_for_each_phase(job: Job, kept: bool) -> None:
    """A new one, wrapped while the old one is there, which may step once more."""
    model = job.ddp(layers())
    old: Optimizer | None = None
    for _phase in range(3):
        optimizer = job.wrap(adamw(model), model)
        train(job, model, optimizer, steps=3)
        if kept and old is not None:
            train(job, model, old, steps=1)
        old = optimizer
    job.record_state(model, optimizer)


# -- gradients -----------------------------------------------------------------------------


@script(adamw, layers)
def gradients_changed_after_the_step(job: Job, model: Any, optimizer: Any) -> None:
    """One is read, whose bucket comes; others of that bucket are written, before any update."""

    def change(step: int) -> None:
        weight, bias = model.module[step % 5 * 2].parameters()
        job.record("read", bias.grad.sum())
        weight.grad.mul_(3.0)
        model.module[(step + 1) % 5 * 2].bias.grad.zero_()

    zero_grad = partial(optimizer.zero_grad, set_to_none=False)
    train(job, model, optimizer, steps=STEPS, after_step=change, zero_grad=zero_grad)


# -- models --------------------------------------------------------------------------------


class Waves(nn.Module):
    """Complex numbers between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.front = layers(1)
        self.waves = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.waves * self.front(x)).sum(-1)


@script(sgd, Waves)
def complex_numbers(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer, steps=STEPS)


@script(sgd, Waves, when="passes", steps=STEPS)
def complex_and_accumulated(job: Job, model: Any, optimizer: Any, step: int) -> None:
    for micro in range(2):
        with reduced_if(model, micro == 1):
            backward(job, model, 2 * step + micro)
    clip_grad_norm_(model.module.front.parameters(), 0.1)
    job.record("gradients", gradients(model))


@script(adamw, layers, when="after_step", steps=STEPS)
def ddp_copied_each_step(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """DDP itself, whose copy reduces on its own."""
    if step % 2:
        twin = copy.deepcopy(model)
        backward(job, twin, 50 + step)
        job.record("gradients of a copy", gradients(twin))


def read_elsewhere(job: Job, how: str, first: int) -> None:
    """Others have the memory of the weights from step ``first`` to ``first`` + 3."""
    module = layers()
    player = copy.deepcopy(module)
    model, optimizer = job.begin(adamw, module)
    kept: list[Any] = []

    def read(step: int) -> None:
        if step == first and how == "player":
            for theirs, ours in zip(player.parameters(), module.parameters(), strict=True):
                theirs.data = ours.data
        elif step == first:
            kept.extend(parameter.detach() for parameter in module.parameters())
            kept[:] = [each.numpy() for each in kept] if how == "numpy" else kept
        if step == first + 3:
            kept.clear()
        with torch.no_grad():
            job.record("played", player(job.inputs(50 + step)) if how == "player" else 0)
        job.record("kept", [torch.as_tensor(each).clone() for each in kept])

    train(job, model, optimizer, steps=STEPS, after_step=read)
    job.record_state(model, optimizer)


# -- ranks that end earlier ----------------------------------------------------------------


def joined(job: Job, finds_unused: bool, first: int) -> None:
    """The first rank has ``first`` batches, each one after it three more; all go on together."""
    module = Branching() if finds_unused else layers()
    model, optimizer = job.begin(adamw, module, find_unused_parameters=finds_unused)

    def inputs(step: int) -> Tensor:
        if isinstance(module, Branching):
            module.turn = ("left", "right", "both")[(step // 2 + step % 2 * job.rank) % 3]
        return job.inputs(step)

    with model.join():
        train(job, model, optimizer, steps=first + 3 * job.rank, inputs=inputs)
    job.record_state(model, optimizer)
    train(job, model, optimizer, steps=STEPS, first_step=50, inputs=inputs)
    job.record_state(model, optimizer)


def joined_in_vain(what: str) -> str:
    """What is raised in the first pass under a join() that a training cannot go on in."""
    module: Any = Waves() if what == "complex" else layers()
    name, parameter = next(module.named_parameters())
    fields: dict[str, dict[str, Any]] = {
        "sharded": {"shard": True},
        "AdamA": {"accumulate": "adama"},
        "groups": {"groups": {parameter: None}},
    }
    if what == "groups":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [name])
    with contextlib.closing(Job(wrapped=True)) as job:
        model = job.ddp(module)
        optimizer = job.wrap(adamw(model), model, **fields.get(what, {}))

        def join() -> None:
            with model.join(divide_by_initial_world_size=what != "divided by those left"):
                train(job, model, optimizer, steps=1)

        return raised(join)


# -- compiled ------------------------------------------------------------------------------


def strides_change(job_of: Callable[..., Job]) -> tuple[list[float], str]:
    """The weights after training in which the module changes its memory format, and the reason."""
    job = job_of(wrapped=True)
    model = job.ddp(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)))
    optimizer = job.wrap(sgd(model, lr=0.05, momentum=0.0), model)
    for steps, first in ((5, 0), (7, 5)):
        train(
            job,
            model,
            optimizer,
            steps=steps,
            first_step=first,
            inputs=lambda step: job.inputs(step, 2, 3, 8, 8),
        )
        model.to(memory_format=torch.channels_last)
    job.close()
    weights = [float(x) for parameter in model.parameters() for x in parameter.detach().flatten()]
    return weights, str(job.stats["reason"])


# -- what the log says ---------------------------------------------------------------------


def said(
    script: tuple[str, str], args: list[Any], options: dict[str, Any], kind: type[Job]
) -> list[str]:
    """What this rank logs in a wrapped run of ``script``."""
    with listening() as lines, contextlib.closing(kind(wrapped=True, **options)) as job:
        resolve(script)(job, *args)
    return lines


@script(adamw, layers)
def plain_module(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer, steps=STEPS)
