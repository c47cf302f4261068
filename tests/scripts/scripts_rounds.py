"""Scripts about what DDP decides: what a round is, whose gradients, when settings change.

Buckets are small, and their size is the script's own, so that DDP keeps it. Every rank is late now
and then: what reads a gradient or a weight too early shall not be right by chance. `held` makes
sure of it: there a sum does not begin before somebody waits for it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_worker import resolve
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from training import Job, adamw, sgd, train

from bytesched.plugins.c10d import ddp as ddps
from bytesched.plugins.planned import ddp_session
from bytesched.plugins.planned import guard as guards
from bytesched.plugins.planned.wire import GroupWire
from bytesched.verdict import Comparison, Verdict

STEPS = 8
WIDTH = 24
#: two layers or so: four rounds of these are three buckets each
BUCKET_MB = 0.005
Layers = nn.Sequential


#: of too few rounds, left to DDP from the start, or with a join(), after which there are none
WITHOUT_TURNS = {
    *("called_around", "forward_called", "forward_called_each_time"),
    *("hook_registered", "in_a_context", "joined"),
}


class HeldWork:
    """A collective that begins when somebody waits for it, after all that should have begun before.

    Args:
        begin: begins it.
        queue: those that have not begun, in the order in which they should have.
    """

    def __init__(self, begin: Callable[[], Any], queue: list[HeldWork]) -> None:
        self._begin = begin
        self._queue = queue
        self._work: Any = None
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        queue.append(self)

    def wait(self, *limit: Any) -> None:
        while self._work is None:
            first = self._queue.pop(0)
            first._work = first._begin()
        self._work.wait(*limit)
        if not self._ended.done():
            self._ended.set_result(None)

    def is_completed(self) -> bool:
        return self._ended.done()

    def get_future(self) -> torch.futures.Future[None]:
        return self._ended


@contextlib.contextmanager
def holding() -> Iterator[None]:
    """Inside, what is wrapped gets a wire on which nothing begins by itself."""
    make: Any = GroupWire.__init__

    def made(wire: Any, *args: Any) -> None:
        make(wire, *args)
        queue: list[HeldWork] = []
        starts = wire.start, wire.start_largest
        wire.start = lambda tensor, key="": HeldWork(partial(starts[0], tensor, key), queue)
        wire.start_largest = lambda tensor: HeldWork(partial(starts[1], tensor), queue)

    with mock.patch.object(GroupWire, "__init__", made):
        yield


def held(job: Job, script: tuple[str, str], *args: Any) -> None:
    """``script`` over such a wire."""
    with holding():
        resolve(script)(job, *args)


def taking_turns(job: Job, script: tuple[str, str], *args: Any) -> None:
    """``script`` with turns of three rounds or so: a plan and DDP by itself, all the time."""
    turns = 0
    begins = guards.Guard.plain_begins

    def plain_begins(guard: guards.Guard) -> None:
        nonlocal turns
        turns += 1
        begins(guard)

    few = {"SETTLED": 2, "SETTLED_AGAIN": 1, "COUNTED": 1, "SETTLED_PLAIN": 0}
    with contextlib.ExitStack() as undecided:
        undecided.enter_context(mock.patch.object(Comparison, "verdict", return_value=Verdict.OPEN))
        for name, rounds in few.items():
            undecided.enter_context(mock.patch.object(guards, f"_{name}", rounds))
        undecided.enter_context(mock.patch.object(guards.Guard, "plain_begins", plain_begins))
        resolve(script)(job, *args)
    assert turns or not job.wrapped or script[1] in WITHOUT_TURNS, "no turn was taken"


def decided(job: Job, views: bool, verdict: str) -> None:
    """A turn of a few rounds that ends with ``verdict``, and what follows."""
    few = {"SETTLED": 2, "COUNTED": 2, "SETTLED_PLAIN": 1}
    with contextlib.ExitStack() as made:
        found = mock.patch.object(Comparison, "verdict", return_value=Verdict[verdict])
        made.enter_context(found)
        for name, rounds in few.items():
            made.enter_context(mock.patch.object(guards, f"_{name}", rounds))
        usual(job, layers(), views, steps=16)


def in_buckets_of_ours(job: Job, script: tuple[str, str], *args: Any) -> None:
    """The same, where the script leaves the size of buckets open."""
    with mock.patch.object(sys.modules[__name__], "BUCKET_MB", None):
        held(job, script, *args)


def layers(count: int = 4) -> Layers:
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    return Layers(*(layer for pair in pairs for layer in pair), nn.Linear(WIDTH, WIDTH))


def ddp(job: Job, module: nn.Module, views: bool, **arguments: Any) -> Any:
    return job.ddp(
        module, **{"bucket_cap_mb": BUCKET_MB, "gradient_as_bucket_view": views} | arguments
    )


def late(job: Job, step: int) -> None:
    """This rank comes to ``step`` when it likes."""
    time.sleep(0.004 * random.Random(f"{job.rank} {step}").random())


def batch(job: Job, step: int) -> Tensor:
    late(job, step)
    return job.inputs(step, 4, WIDTH)


def loss_of(called: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (called(x) - x).square().mean()


def looped(
    job: Job,
    model: Any,
    optimizer: Optimizer,
    steps: int = STEPS,
    called: Callable[[int], Callable[[Tensor], Tensor]] | None = None,
    **arguments: Any,
) -> None:
    """`train` with late batches, and with ``called(step)`` in place of the model."""
    now = 0

    def inputs(step: int) -> Tensor:
        nonlocal now
        now = step
        return batch(job, step)

    def call(x: Tensor) -> Tensor:
        return (called(now) if called else model)(x)

    train(job, call, optimizer, steps=steps, inputs=inputs, **arguments)


def usual(
    job: Job,
    module: nn.Module,
    views: bool,
    *,
    make: Callable[..., Optimizer] = adamw,
    ddp_arguments: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """The usual loop over ``module``; returns its DDP."""
    model = ddp(job, module, views, **ddp_arguments or {})
    optimizer = job.wrap(make(model), model)
    looped(job, model, optimizer, **arguments)
    job.record_state(model, optimizer)
    return model


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


# -- what is a round -----------------------------------------------------------------------


def called_around(job: Job, views: bool) -> None:
    """Two of three passes go around DDP, whose gradients stay this rank's own."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)
    looped(job, model, optimizer, called=lambda step: model.module if step % 3 else model)
    job.record("gradients", gradients(model))
    job.record_state(model, optimizer)


def probed_everywhere(job: Job, views: bool) -> None:
    """A batch through the module after each step, for the squares of its gradients."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def probe(step: int) -> None:
        optimizer.zero_grad()
        model.module(batch(job, 50 + step)).square().mean().backward()
        job.record("squares", [p.grad.square().sum() for p in model.parameters()])

    looped(job, model, optimizer, after_step=probe)
    job.record_state(model, optimizer)


def probed_before_the_step(job: Job, views: bool) -> None:
    """The same between backward() and step(), so that both gradients are added up."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def probe(step: int) -> None:
        if step % 2:
            model.module(batch(job, 50 + step)).square().mean().backward()

    looped(job, model, optimizer, before_step=probe)
    job.record_state(model, optimizer)


def attacked(job: Job, views: bool) -> None:
    """Inputs that two passes around DDP have made worse."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)
    for step in range(STEPS):
        x = batch(job, step)
        for _ in range(2):
            x = x.detach().requires_grad_()
            model.module(x).square().mean().backward()
            assert x.grad is not None
            x = x + 0.1 * x.grad.sign()
        optimizer.zero_grad()
        loss = loss_of(model, x.detach())
        loss.backward()
        optimizer.step()
        job.record("loss", loss)
    job.record_state(model, optimizer)


def probed_on_one_rank(job: Job, views: bool, barrier: bool) -> None:
    """The first rank looks at gradients of its own between two steps."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def probe(step: int) -> None:
        if step % 3 == 2 and job.rank == 0:
            x = batch(job, 50 + step).requires_grad_()
            model.module(x)[0, 0].backward()
            job.record("saliency", x.grad)
            job.record("gradients", gradients(model))
            model.zero_grad()
        if barrier:
            job.barrier()

    looped(job, model, optimizer, after_step=probe)
    job.record_state(model, optimizer)


def forward_called(job: Job, views: bool, mixed: bool) -> None:
    """DDP's forward() by its name, with accumulation."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)
    for step in range(3 * STEPS):
        call = model if mixed and step % 2 == 0 else model.forward
        is_first = step % 3 < 2
        with model.no_sync() if is_first else contextlib.nullcontext():
            loss = loss_of(call, batch(job, step))
            loss.backward()
        if is_first and step < 9:
            job.record("own gradients", gradients(model))
        job.record("loss", loss)
        if not is_first:
            optimizer.step()
            optimizer.zero_grad()
    job.record_state(model, optimizer)


def forward_called_each_time(job: Job, views: bool) -> None:
    usual(job, layers(), views, called=lambda step: job.kept[-1].forward)


def forward_for_a_look(job: Job, views: bool) -> None:
    """A forward pass after each step that no backward pass follows, and then accumulation."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(sgd(model), model)
    for step in range(STEPS):
        with model.no_sync():
            loss_of(model, batch(job, 100 + step)).backward()
        loss = loss_of(model, batch(job, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.record("loss", loss)
        job.record("looked", model(batch(job, 200 + step)).argmax(-1))
    job.record_state(model, optimizer)


def two_backwards(job: Job, views: bool) -> None:
    """Through one graph, and then through two graphs, whose forward passes come first."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(sgd(model), model)
    for step in range(STEPS):
        output = model(batch(job, step))
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()
        optimizer.step()
        if step % 2:
            optimizer.zero_grad()
        one, other = model(batch(job, 100 + step)), model(batch(job, 200 + step))
        one.square().mean().backward()
        other.square().mean().backward()
        if step % 3 == 0:
            job.record("gradients", gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        job.record("output", output)
    job.record_state(model, optimizer)


def several_forwards(job: Job, views: bool) -> None:
    """Three forward passes, one of them without DDP's sums, and one backward pass."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)
    for step in range(STEPS):
        with model.no_sync() if step % 2 else contextlib.nullcontext():
            output = model(batch(job, step))
        output = output + model(batch(job, 100 + step)) * model(batch(job, 200 + step))
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.record("loss", loss)
    job.record_state(model, optimizer)


def accumulated(job: Job, views: bool, how: str) -> None:
    """Three backward passes, the first two with ``how`` they are summed, and gradients kept."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(sgd(model), model)
    for step in range(STEPS):
        for micro in range(3):
            apart = how == "no_sync" and micro < 2
            with model.no_sync() if apart else contextlib.nullcontext():
                loss = loss_of(model, batch(job, 10 * step + micro))
                loss.backward()
            job.record("loss", loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    job.record_state(model, optimizer)


def accumulated_with(job: Job, views: bool, what: str) -> None:
    """Under no_sync, with what DDP does as a forward pass begins, or learns from the first one."""
    kinds: dict[str, Callable[[], nn.Module]] = {"unused": Branching, "static": layers}
    module: Any = kinds.get(what, Normalised)()
    if what == "unused":
        module.register_buffer("seen", torch.zeros(1))
    arguments = {"find_unused_parameters": what == "unused", "static_graph": what == "static"}
    model = ddp(job, module, views, **arguments)
    optimizer = job.wrap(sgd(model), model)
    for step in range(STEPS):
        passes = 3 + (job.rank + step) % 2 if what == "unequal" else 3
        for micro in range(passes if step or what != "static" else 1):
            is_last = micro == passes - 1 or (what == "static" and not step)
            if what == "unused":
                module.turn = int(micro == 0)
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss_of(model, batch(job, 10 * step + micro)).backward()
        job.record("gradients", gradients(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    job.record_state(model, optimizer)


def closure(job: Job, views: bool) -> None:
    model = ddp(job, layers(), views)
    optimizer = job.wrap(sgd(model), model)
    for step in range(STEPS):

        def again(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batch(job, step))
            loss.backward()
            return loss

        job.record("loss", optimizer.step(again))
    job.record_state(model, optimizer)


class _Failing(torch.autograd.Function):
    """Its backward pass ends before the first gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise KeyError("the script's own")


def exception_caught(job: Job, views: bool) -> None:
    """A backward pass that fails in front of the model, on all ranks, and is tried again."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def called(step: int) -> Callable[[Tensor], Tensor]:
        if step % 3 == 2:
            output: Any = _Failing.apply(model(batch(job, 100 + step)))  # type: ignore[no-untyped-call]
            with contextlib.suppress(KeyError):
                output.sum().backward()
        return model  # type: ignore[no-any-return]

    looped(job, model, optimizer, called=called)
    job.record_state(model, optimizer)


# -- whose gradients -----------------------------------------------------------------------


def frozen_at_wrap(job: Job, views: bool) -> None:
    """A layer that DDP averages is frozen when it is wrapped, and thawed later."""
    module = layers()
    model = ddp(job, module, views, find_unused_parameters=True)
    module[2].requires_grad_(False)
    optimizer = job.wrap(adamw(model), model)
    looped(job, model, optimizer, steps=4)
    module[2].requires_grad_(True)
    looped(job, model, optimizer, first_step=4)
    job.record("gradients", gradients(model))
    job.record_state(model, optimizer)


def thawed_before_wrap(job: Job, views: bool) -> None:
    """A layer that DDP does not average, as it was frozen when DDP was made."""
    module = layers()
    module[2].requires_grad_(False)
    model = ddp(job, module, views)
    module[2].requires_grad_(True)
    optimizer = job.wrap(adamw(model), model)
    looped(job, model, optimizer)
    job.record("gradients", gradients(model))
    job.record_state(model, optimizer)


def frozen_by_turns(job: Job, views: bool) -> None:
    model = ddp(job, layers(), views, find_unused_parameters=True)
    optimizer = job.wrap(adamw(model), model)

    def called(step: int) -> Callable[[Tensor], Tensor]:
        for number, layer in enumerate(model.module):
            layer.requires_grad_(number % 4 != 2 * (step % 2))
        return model  # type: ignore[no-any-return]

    looped(job, model, optimizer, called=called, steps=2 * STEPS)
    job.record_state(model, optimizer)


class Headed(nn.Module):
    """An encoder that others have too, and a head of its own."""

    def __init__(self, encoder: nn.Module, outputs: int, *, detached: bool) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(WIDTH, outputs)
        self.detached = detached

    def forward(self, x: Tensor) -> Any:
        encoded = self.encoder(x)
        return self.head(encoded.detach() if self.detached else encoded)


def shared_encoder(job: Job, views: bool, detached: bool) -> None:
    """Two DDPs and two optimizers over one encoder, which one of them steps."""
    encoder = layers(2)
    critic = ddp(job, Headed(encoder, 1, detached=False), views)
    actor = ddp(job, Headed(encoder, 4, detached=detached), views, find_unused_parameters=detached)
    of_critic = job.wrap(adamw(critic), critic)
    of_actor = job.wrap(adamw(actor.module.head), actor)
    for step in range(STEPS):
        x = batch(job, step)
        value = (critic(x) - x[:, :1]).square().mean()
        of_critic.zero_grad()
        value.backward()
        of_critic.step()
        action = (actor(x) - x[:, :4]).square().mean()
        of_actor.zero_grad()
        action.backward()
        of_actor.step()
        job.record("losses", [value, action])
    job.record_state(critic, of_critic)
    job.record_state(actor, of_actor)


def shared_and_stepped_by_both(job: Job, views: bool) -> None:
    """The same, where both optimizers have the encoder."""
    encoder = layers(2)
    models = [ddp(job, Headed(encoder, 4, detached=False), views) for _ in range(2)]
    optimizers = [job.wrap(sgd(model), model) for model in models]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            x = batch(job, step)
            loss = (model(x) - x[:, :4]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.record("loss", loss)
    for model, optimizer in zip(models, optimizers, strict=True):
        job.record_state(model, optimizer)


def nested(job: Job, views: bool) -> None:
    """A DDP inside of another one: gradients are averaged by both.

    Not as views: then plain DDP, too, raises or averages what it finds.
    """
    inner = ddp(job, layers(2), False)
    usual(job, Layers(inner, nn.Tanh(), nn.Linear(WIDTH, WIDTH)), False)


def rewrapped(job: Job, views: bool, kept: bool) -> None:
    """After some steps the model comes into a new DDP, and gets a new optimizer."""
    module = layers()
    first = ddp(job, module, views)
    optimizer = job.wrap(adamw(first), first)
    looped(job, first, optimizer)
    saved = copy.deepcopy(module.state_dict())
    if not kept:
        del first
        job.drop()
        job.kept.clear()
    second = ddp(job, module, views)
    second.module.load_state_dict(saved)
    optimizer = job.wrap(adamw(second), second)
    looped(job, second, optimizer, first_step=STEPS)
    job.record_state(second, optimizer)


def ignored(job: Job, views: bool) -> None:
    """Parameters that DDP was told to leave alone stay this rank's own."""
    module = layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, ["2.weight", "4.bias"]
    )
    model = usual(job, module, views)
    job.record("gradients", gradients(model))


def own_group(job: Job, views: bool) -> None:
    group = dist.new_group(list(range(dist.get_world_size())))
    usual(job, layers(), views, ddp_arguments={"process_group": group})


# -- backward passes beside the model's ----------------------------------------------------


def regularised_beside(job: Job, views: bool, zeroed: str) -> None:
    """Between backward() and step(), of the weights alone."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def regularise(_: int) -> None:
        (0.1 * sum(p.square().sum() for p in model.module.parameters())).backward()

    zero_grad = partial(optimizer.zero_grad, set_to_none=zeroed == "None")
    looped(job, model, optimizer, before_step=regularise, zero_grad=zero_grad)
    job.record_state(model, optimizer)


def submodule_beside(job: Job, views: bool) -> None:
    """Between backward() and step(), of one layer, called by itself."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def look(step: int) -> None:
        model.module[4](batch(job, 50 + step)).square().mean().backward()

    looped(job, model, optimizer, before_step=look)
    job.record_state(model, optimizer)


def built_before_and_run_after(job: Job, views: bool) -> None:
    """A graph of the weights from before the forward pass, run when gradients are under way."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(sgd(model, momentum=0.0), model)
    for step in range(STEPS):
        penalty: Any = 0.1 * sum(p.square().sum() for p in model.module.parameters())
        loss = loss_of(model, batch(job, step))
        loss.backward()
        penalty.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.record("loss", loss)
    job.record_state(model, optimizer)


def grad_taken_beside(job: Job, views: bool) -> None:
    """`torch.autograd.grad` between backward() and step(), and after it."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def take(step: int) -> None:
        loss = model.module(batch(job, 50 + step)).square().mean()
        job.record("taken", torch.autograd.grad(loss, list(model.parameters())))

    looped(job, model, optimizer, before_step=take, after_step=take)
    job.record_state(model, optimizer)


# -- settings that change ------------------------------------------------------------------


def hook_registered(job: Job, views: bool, kind: str, first: int) -> None:
    """After ``first`` steps under wrap: DDP compresses from then on."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)
    calls: list[int] = []

    # DDP looks at annotations, which are texts in this file.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        calls.append(bucket.index())
        return fp16_compress_hook(state, bucket)

    looped(job, model, optimizer, steps=first)
    if kind == "builtin":
        c10d: Any = dist
        model._register_builtin_comm_hook(c10d.BuiltinCommHookType.FP16_COMPRESS)
    else:
        model.register_comm_hook(None, hook)
    looped(job, model, optimizer, first_step=first)
    # How often depends on the buckets, of which a new reducer has others in its first round.
    job.record("was called", bool(calls) or kind == "builtin")
    job.record_state(model, optimizer)


def in_a_context(job: Job, views: bool, first: int) -> None:
    """After ``first`` steps, gradients would go to a context of distributed autograd."""
    model = ddp(job, layers(), views)
    with mock.patch.object(ddps, "are_in_a_context", return_value=not first):
        optimizer = job.wrap(adamw(model), model)
    looped(job, model, optimizer, steps=first)
    with mock.patch.object(ddp_session, "are_in_a_context", return_value=True):
        looped(job, model, optimizer, first_step=first)
    job.record_state(model, optimizer)


def unwrapped_and_wrapped(job: Job, views: bool) -> None:
    model = ddp(job, layers(), views)
    optimizer = sgd(model)
    for turn in range(3):
        job.wrap(optimizer, model)
        looped(job, model, optimizer, first_step=2 * turn * STEPS)
        job.unwrap(optimizer)
        job.record("gradients", gradients(model))
        looped(job, model, optimizer, steps=3, first_step=(2 * turn + 1) * STEPS)
    job.record_state(model, optimizer)


def wrapped_in_the_middle(job: Job, views: bool, zeroed: str) -> None:
    model = ddp(job, layers(), views)
    optimizer = sgd(model)
    zero_grad = partial(optimizer.zero_grad, set_to_none=zeroed == "None")
    looped(job, model, optimizer, steps=3, zero_grad=zero_grad)
    job.wrap(optimizer, model)
    looped(job, model, optimizer, first_step=3, zero_grad=zero_grad)
    job.record_state(model, optimizer)


def optimizer_for_each_phase(job: Job, views: bool, kept: bool) -> None:
    """A new one, wrapped while the old one is there, which may step once more."""
    model = ddp(job, layers(), views)
    old: Optimizer | None = None
    for _phase in range(3):
        optimizer = job.wrap(adamw(model), model)
        looped(job, model, optimizer, steps=3)
        if kept and old is not None:
            looped(job, model, old, steps=1)
        old = optimizer
    job.record_state(model, optimizer)


def grouped_and_scheduled(job: Job, views: bool) -> None:
    """Two groups, a schedule, and a setting that changes after each step."""
    model = ddp(job, layers(), views)
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": parameters[::2]},
        {"params": parameters[1::2], "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    job.wrap(optimizer, model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)

    def change(step: int) -> None:
        schedule.step()
        optimizer.param_groups[0]["weight_decay"] = 0.01 * step

    looped(job, model, optimizer, after_step=change)
    job.record_state(model, optimizer)


# -- gradients -----------------------------------------------------------------------------


def plain_loop(job: Job, views: bool, zeroed: str) -> None:
    """The usual loop, in which gradients are ``zeroed`` in one way or never."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(sgd(model, lr=0.01), model)
    ways: dict[str, Callable[[], object]] = {
        "to None": optimizer.zero_grad,
        "to zero": partial(optimizer.zero_grad, set_to_none=False),
        "by the model": model.zero_grad,
        "never": lambda: None,
    }
    looped(job, model, optimizer, zero_grad=ways[zeroed])
    job.record("gradients", gradients(model))
    job.record_state(model, optimizer)


def zeroed_after_the_step(job: Job, views: bool, zeroed: str) -> None:
    """The other place for it, where updates are outstanding."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)
    zero = partial(optimizer.zero_grad, set_to_none=zeroed == "to None")
    looped(job, model, optimizer, zero_grad=lambda: None, after_step=lambda _: zero())
    job.record_state(model, optimizer)


def gradients_kept(job: Job, views: bool, zeroed: str) -> None:
    """References to gradients of the round before are read in the next one.

    With views, in plain DDP too, they have become that round's.
    """
    model = ddp(job, layers(), views)
    optimizer = job.wrap(sgd(model), model)
    kept: list[Tensor | None] = []

    def keep(step: int) -> None:
        if step % 2:
            job.record("kept", kept)
        kept[:] = gradients(model)

    zero_grad = partial(optimizer.zero_grad, set_to_none=zeroed == "to None")
    looped(job, model, optimizer, before_step=keep, zero_grad=zero_grad)
    job.record("kept", kept)
    job.record_state(model, optimizer)


def gradients_read(job: Job, views: bool, after: bool) -> None:
    """One by one, by a sum, by numpy, by all of their norms."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def read(step: int) -> None:
        last = model.module[8].bias.grad
        job.record("sum", model.module[step % 5 * 2].weight.grad.sum())
        job.record("array", torch.from_numpy(last.numpy().copy()))
        if step % 2:
            job.record("norms", [p.grad.double().norm() for p in model.parameters()])

    look: dict[str, Any] = {"after_step" if after else "before_step": read}
    looped(job, model, optimizer, **look)
    job.record_state(model, optimizer)


def gradients_changed(job: Job, views: bool) -> None:
    """Replaced, changed in place, and dropped, in turn."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def change(step: int) -> None:
        for number, parameter in enumerate(model.parameters()):
            if (number + step) % 3 == 0:
                parameter.grad = parameter.grad * 0.5
            elif (number + step) % 3 == 1:
                parameter.grad.mul_(2.0)
            else:
                parameter.grad = None

    looped(job, model, optimizer, before_step=change)
    job.record_state(model, optimizer)


def gradients_changed_after_the_step(job: Job, views: bool) -> None:
    """One is read, whose bucket comes; others of that bucket are written, before any update."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def change(step: int) -> None:
        weight, bias = model.module[step % 5 * 2].parameters()
        job.record("read", bias.grad.sum())
        weight.grad.mul_(3.0)
        model.module[(step + 1) % 5 * 2].bias.grad.zero_()

    zero_grad = partial(optimizer.zero_grad, set_to_none=False)
    looped(job, model, optimizer, after_step=change, zero_grad=zero_grad)
    job.record_state(model, optimizer)


def gradients_dropped(job: Job, views: bool) -> None:
    """The whole round, before the step or instead of it."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def drop(step: int) -> None:
        if step % 3 == 1:
            model.zero_grad(set_to_none=step % 2 == 0)

    looped(job, model, optimizer, before_step=drop)
    job.record_state(model, optimizer)


def clipped(job: Job, views: bool) -> None:
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def clip(step: int) -> None:
        if step % 3:
            job.record("norm", clip_grad_norm_(model.parameters(), 0.05))

    looped(job, model, optimizer, before_step=clip)
    job.record_state(model, optimizer)


def scaled(job: Job, views: bool) -> None:
    """A `GradScaler` that meets an infinity on one rank."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(sgd(model), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(STEPS):
        x = batch(job, step)
        if step == 5 and job.rank == 0:
            x = x * float("inf")
        optimizer.zero_grad()
        loss = loss_of(model, x)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            job.record("norm", clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        job.record("scale", [loss, torch.tensor(scaler.get_scale())])
    job.record_state(model, optimizer)


# -- models --------------------------------------------------------------------------------


class Branching(nn.Module):
    """One of two layers in the middle, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.left, self.right, self.back = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.turn = 0

    def forward(self, x: Tensor) -> Any:
        x = self.front(x)
        if self.turn:
            x = (self.left if self.turn == 1 else self.right)(x)
        return self.back(x.tanh())


def unused(job: Job, views: bool, zeroed: str) -> None:
    """By turns of each rank's own; what no rank uses keeps the gradient that it had."""
    module = Branching()
    model = ddp(job, module, views, find_unused_parameters=True)
    optimizer = job.wrap(adamw(model), model)

    def called(step: int) -> Callable[[Tensor], Tensor]:
        module.turn = (step // 2 + step % 2 * job.rank) % 3
        return model  # type: ignore[no-any-return]

    zero_grad = partial(optimizer.zero_grad, set_to_none=zeroed == "to None")
    looped(job, model, optimizer, steps=12, called=called, zero_grad=zero_grad)
    job.record("gradients", gradients(model))
    job.record_state(model, optimizer)


def static(job: Job, views: bool) -> None:
    usual(job, layers(), views, ddp_arguments={"static_graph": True})


def static_and_unused(job: Job, views: bool, zeroed: str) -> None:
    module = Branching()
    module.turn = 1
    model = ddp(job, module, views, static_graph=True)
    optimizer = job.wrap(adamw(model), model)
    zero_grad = partial(optimizer.zero_grad, set_to_none=zeroed == "to None")
    looped(job, model, optimizer, zero_grad=zero_grad)
    job.record("gradients", gradients(model))
    job.record_state(model, optimizer)


class Checkpointed(nn.Module):
    """Each of its parts is computed again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layers(1) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


def checkpointed(job: Job, views: bool, reentrant: bool, is_static: bool) -> None:
    model = ddp(job, Checkpointed(reentrant=reentrant), views, static_graph=is_static)
    optimizer = job.wrap(adamw(model), model)
    looped(job, lambda x: model(x.requires_grad_()), optimizer)
    job.record_state(model, optimizer)


class Embedded(nn.Module):
    """Tokens in, a guess at each of them out."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH, sparse=sparse)
        self.body = layers(1)
        self.head = nn.Linear(WIDTH, 12, bias=False)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.body(self.embed(tokens)))


def _embedded(job: Job, module: Embedded, views: bool) -> None:
    model = ddp(job, module, views)
    optimizer = job.wrap(sgd(model, momentum=0.0), model)

    def tokens(step: int) -> Tensor:
        late(job, step)
        return job.inputs(step, 8).mul(100).long().remainder(12)

    train(job, model, optimizer, inputs=tokens)
    job.record_state(model, optimizer)


def sparse(job: Job, views: bool) -> None:
    _embedded(job, Embedded(sparse=True), views)


def tied(job: Job, views: bool) -> None:
    module = Embedded()
    module.head.weight = module.embed.weight
    _embedded(job, module, views)


def tied_by_data(job: Job, views: bool) -> None:
    """Two parameters, with two gradients, over one memory."""
    module = Embedded()
    module.head.weight.data = module.embed.weight.data
    _embedded(job, module, views)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Any:
        part: Any
        for part in self.parts:
            x = part(x.to(part.weight.dtype)).tanh()
        return x.float()


def mixed_dtypes(job: Job, views: bool) -> None:
    usual(job, Mixed(), views, make=sgd)


def autocast(job: Job, views: bool) -> None:
    def called(_: int) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return job.kept[-1](x).float()  # type: ignore[no-any-return]

        return call

    usual(job, layers(), views, called=called)


class Waves(nn.Module):
    """Complex numbers between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.front = layers(1)
        self.waves = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.waves * self.front(x)).sum(-1)


def complex_numbers(job: Job, views: bool) -> None:
    usual(job, Waves(), views, make=sgd)


def complex_and_accumulated(job: Job, views: bool) -> None:
    """Every other pass under `no_sync`, and real gradients are clipped."""
    model = ddp(job, Waves(), views)
    optimizer = job.wrap(sgd(model), model)
    for step in range(STEPS):
        for micro in range(2):
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                loss_of(model, batch(job, 2 * step + micro)).backward()
        clip_grad_norm_(model.module.front.parameters(), 0.1)
        job.record("gradients", gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    job.record_state(model, optimizer)


class Normalised(nn.Module):
    """Buffers that the first rank sends to all before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.norm = layers(1), nn.BatchNorm1d(WIDTH)
        self.back = layers(1)

    def forward(self, x: Tensor) -> Any:
        return self.back(self.norm(self.front(x)).relu())


def evaluated(job: Job, views: bool) -> None:
    """After each step, by DDP or around it; buffers go on from there."""
    model = ddp(job, Normalised(), views)
    optimizer = job.wrap(adamw(model), model)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            called = model if step % 2 else model.module
            job.record("evaluated", called(batch(job, 50 + step)))
        model.train()

    looped(job, model, optimizer, after_step=evaluate)
    job.record_state(model, optimizer)


def normalised(job: Job, views: bool) -> None:
    usual(job, Normalised(), views, make=sgd)


def copied_each_step(job: Job, views: bool) -> None:
    """An average of weights, by copies of the module, which are used."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def copied(step: int) -> None:
        twin = copy.deepcopy(model.module)
        job.record("copy", twin.state_dict())
        job.record("output", twin(batch(job, 50 + step)))

    looped(job, model, optimizer, after_step=copied)
    job.record_state(model, optimizer)


def ddp_copied_each_step(job: Job, views: bool) -> None:
    """The same of DDP itself, whose copy reduces on its own."""
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def copied(step: int) -> None:
        if step % 2:
            twin = copy.deepcopy(model)
            twin(batch(job, 50 + step)).square().mean().backward()
            job.record("gradients of a copy", gradients(twin))

    looped(job, model, optimizer, after_step=copied)
    job.record_state(model, optimizer)


def saved_each_step(job: Job, views: bool) -> None:
    model = ddp(job, layers(), views)
    optimizer = job.wrap(adamw(model), model)

    def save(_: int) -> None:
        job.record("weights", model.state_dict())
        job.record("memory", [p.data.clone() for p in model.parameters()])
        job.record("optimizer", optimizer.state_dict())

    looped(job, model, optimizer, after_step=save)


def read_elsewhere(job: Job, views: bool, how: str, first: int) -> None:
    """Others have the memory of the weights from step ``first`` to ``first`` + 3."""
    module = layers()
    player = copy.deepcopy(module)
    model = ddp(job, module, views)
    optimizer = job.wrap(adamw(model), model)
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
            job.record("played", player(batch(job, 50 + step)) if how == "player" else 0)
        job.record("kept", [torch.as_tensor(each).clone() for each in kept])

    looped(job, model, optimizer, after_step=read)
    job.record_state(model, optimizer)


# -- ranks that end earlier ----------------------------------------------------------------


def joined(job: Job, views: bool, finds_unused: bool, first: int) -> None:
    """The first rank has ``first`` batches, each one after it three more; all go on together."""
    module = Branching() if finds_unused else layers()
    model = ddp(job, module, views, find_unused_parameters=finds_unused)
    optimizer = job.wrap(adamw(model), model)

    def called(step: int) -> Callable[[Tensor], Tensor]:
        if isinstance(module, Branching):
            module.turn = (step // 2 + step % 2 * job.rank) % 3
        return model  # type: ignore[no-any-return]

    with model.join():
        looped(job, model, optimizer, steps=first + 3 * job.rank, called=called)
    job.record_state(model, optimizer)
    looped(job, model, optimizer, first_step=50, called=called)
    job.record_state(model, optimizer)


# -- compiled ------------------------------------------------------------------------------


def compiled(job: Job, views: bool, when: str) -> None:
    """DDP is compiled, before it is wrapped or after, and it is DDP that is wrapped."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    module: nn.Module = layers(2)
    if when == "inside":
        module = torch.compile(module, backend="aot_eager")  # type: ignore[assignment]
    # The compiler takes no first bucket that is larger than the others.
    model = called = ddp(job, module, views, bucket_cap_mb=1)
    if when == "before":
        called = torch.compile(model, backend="aot_eager")
    optimizer = job.wrap(adamw(model), model)
    if when == "after":
        called = torch.compile(model, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        looped(job, called, optimizer)
    job.record("is compiled", counters["stats"]["unique_graphs"] > 0)
    job.record_state(model, optimizer)


def strides_change(views: bool) -> tuple[list[float], str]:
    """The weights after training in which the module changes its memory format, and the reason."""
    job = Job(wrapped=True)
    model = ddp(job, nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), views)
    optimizer = job.wrap(torch.optim.SGD(model.parameters(), lr=0.05), model)
    for step in range(12):
        if step == 5:
            model.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        inputs = torch.randn(
            2, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + job.rank)
        )
        model(inputs).square().mean().backward()
        optimizer.step()
    job.close()
    weights = [float(x) for parameter in model.parameters() for x in parameter.detach().flatten()]
    return weights, str(job.stats["reason"])


# -- what the log says ---------------------------------------------------------------------


def said(script: tuple[str, str], args: list[Any], options: dict[str, Any]) -> list[str]:
    """What this rank logs in a wrapped run of ``script``."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    job = Job(wrapped=True, **options)
    log = logging.getLogger("bytesched")
    log.addHandler(handler)
    try:
        resolve(script)(job, *args)
        job.close()
    finally:
        log.removeHandler(handler)
    return lines


def plain_module(job: Job) -> None:
    usual(job, layers(), views=False)
