"""Training scripts about optimizers: kinds, schedules, groups, and steps out of the ordinary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from training import STEPS, Job, adamw, backward, closure_of, gradients, mlp, script, sgd, train

from bytesched.errors import PluginError


class SignDescent(optim.Optimizer):
    """An optimizer that nobody has heard of, whose step looks at all gradients at once."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            scale = torch.stack([p.grad.abs().max() for p in used]).max()
            for p in used:
                p.add_(p.grad.sign(), alpha=-group["lr"] * float(scale))


SPLITTABLE: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "sgd_momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd_dampening_decay": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    ),
    "sgd_nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd_foreach": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "sgd_fused": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "sgd_maximize": (optim.SGD, {"lr": 0.01, "maximize": True}),
    "adam": (optim.Adam, {"lr": 0.01}),
    "adam_l2": (optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adam_amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adam_foreach": (optim.Adam, {"lr": 0.01, "foreach": True}),
    "adam_fused": (optim.Adam, {"lr": 0.01, "fused": True}),
    "adamw": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw_single": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": False}),
    "adamw_foreach": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": True}),
    "adamw_fused": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01}),
    "rmsprop_centered": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "adagrad": (optim.Adagrad, {"lr": 0.05}),
    "adagrad_fused": (optim.Adagrad, {"lr": 0.05, "fused": True}),
    "nadam": (optim.NAdam, {"lr": 0.01}),
    "radam": (optim.RAdam, {"lr": 0.01}),
    "adamax": (optim.Adamax, {"lr": 0.01}),
    "adadelta": (optim.Adadelta, {"lr": 1.0}),
    "asgd": (optim.ASGD, {"lr": 0.05}),
    "rprop": (optim.Rprop, {"lr": 0.01}),
}
#: of sums over all that is in a tensor, and one that can step whole alone
OTHERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "unknown": (SignDescent, {"lr": 0.01})
}
if hasattr(optim, "Adafactor"):  # from torch 2.5 on
    OTHERS["adafactor"] = optim.Adafactor, {"lr": 0.01}


def one_optimizer(job: Job, name: str) -> None:
    kind, arguments = (SPLITTABLE | OTHERS)[name]
    model = job.ddp(mlp())
    optimizer = job.wrap(kind(model.parameters(), **arguments), model)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


Schedule = Callable[[optim.Optimizer], optim.lr_scheduler.LRScheduler]
SCHEDULES: dict[str, Schedule] = {
    "step": lambda optimizer: optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3),
    "lambda": lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1)),
    "cosine": lambda optimizer: optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    # Moves the momentum as well.
    "one_cycle": lambda optimizer: optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.2, total_steps=STEPS
    ),
}


@script(sgd, wraps=False)
def schedule(job: Job, model: Any, optimizer: Any, name: str, made: str) -> None:
    if made == "after":
        job.wrap(optimizer, model)
    scheduler = SCHEDULES[name](optimizer)
    if made == "before":
        job.wrap(optimizer, model)
    train(job, model, optimizer, after_step=lambda _: scheduler.step())
    job.record("lr", scheduler.get_last_lr())


@script(lambda model: sgd(model, lr=torch.tensor(0.1)))
def tensor_lr(job: Job, model: Any, optimizer: Any) -> None:
    scheduler = SCHEDULES["step"](optimizer)
    train(job, model, optimizer, after_step=lambda _: scheduler.step())


@script(adamw, when="after_step")
def lr_by_hand(job: Job, model: Any, optimizer: Any, step: int) -> None:
    optimizer.param_groups[0].update(lr=0.01 / (step + 2), betas=(0.9, 0.9 + step / 100))


def of_two_groups(model: nn.Module) -> optim.Optimizer:
    """Groups that cut across layers, with different hyper-parameters."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "lr": 0.02}]
    return optim.AdamW(groups, lr=0.01, weight_decay=0.1)


@script(of_two_groups)
def parameter_groups(job: Job, model: Any, optimizer: Any) -> None:
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)

    def change(step: int) -> None:
        scheduler.step()
        optimizer.param_groups[0]["weight_decay"] = 0.01 * step

    train(job, model, optimizer, after_step=change)


class OneMemory(nn.Module):
    """Two parameters over one memory, many layers behind the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(14)))
        self.one, self.other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.other.weight = nn.Parameter(self.one.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers(torch.tanh(self.first(x))))
        y: Tensor = self.other(torch.tanh(self.one(x)))
        return y


def over_one_memory(job: Job, lr: float) -> None:
    """The group of the second one is also that of the layer that forward begins with."""
    model = job.ddp(OneMemory(), bucket_cap_mb=0.001)
    net = model.module
    groups: list[dict[str, Any]] = [
        {"params": [net.one.weight, *net.layers.parameters()]},
        {"params": [*net.first.parameters(), net.other.weight], "lr": lr},
    ]
    optimizer = optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1)
    job.wrap(optimizer, model, partition_bytes=256)
    train(job, model, optimizer)
    job.record_state(model, optimizer)


@script(lambda model: optim.Adam([next(model.parameters())], lr=0.01))
def added_group(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer, steps=3, zero_grad=model.zero_grad)
    optimizer.add_param_group({"params": list(model.parameters())[1:], "lr": 0.05})
    train(job, model, optimizer, first_step=3)


@script(of_two_groups)
def removed_group(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer, steps=4)
    del optimizer.param_groups[1]
    train(job, model, optimizer, first_step=4, steps=3, zero_grad=model.zero_grad)
    # There is no place in a state dict for what is in no group.
    optimizer.state.clear()


def two_optimizers(job: Job, wraps_both: bool = True) -> None:
    model = job.ddp(mlp())
    first, *rest = model.parameters()
    one = job.wrap(optim.Adam([first], lr=0.01), model)
    other = optim.SGD(rest, lr=0.1, momentum=0.9)
    if wraps_both:
        job.wrap(other, model)

    def step_other(step: int) -> None:
        if step % 2:
            other.step()

    train(job, model, one, after_step=step_other, zero_grad=model.zero_grad)
    job.record_state(model, one, other)


def two_models_clipped_together(job: Job) -> None:
    encoder, head = job.ddp(mlp()), job.ddp(nn.Linear(4, 3))
    optimizers = [job.wrap(adamw(model), model) for model in (encoder, head)]
    parameters = [*encoder.parameters(), *head.parameters()]
    for step in range(2 * STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        head(encoder(job.inputs(step))).square().mean().backward()
        job.record("norm", nn.utils.clip_grad_norm_(parameters, 0.1))
        for optimizer in optimizers:
            optimizer.step()
    job.record_state(encoder, optimizers[0])
    job.record_state(head, optimizers[1])


def two_models_of_one_optimizer(job: Job) -> None:
    """The encoder is wrapped with it; the head trains under plain DDP."""
    encoder, head = job.ddp(mlp()), job.ddp(nn.Linear(4, 3))
    optimizer = adamw(nn.ModuleList([encoder, head]))
    job.wrap(optimizer, encoder)
    for model, said in ((head, ", with another"), (encoder, "; unwrap")) if job.wrapped else ():
        with pytest.raises(PluginError, match=f"AdamW is already wrapped{said}"):
            job.wrap(optimizer, model)

    def clip(_: int) -> None:
        job.record("norm", nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1))

    train(job, lambda x: head(encoder(x)), optimizer, before_step=clip)
    job.record_state(encoder, optimizer)
    job.record_state(head)


@script(lambda model: optim.Adam([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.01))
def parameters_outside_the_model(job: Job, model: Any, optimizer: Any) -> None:
    """A temperature that DDP knows nothing of, updated by the same optimizer."""
    temperature = optimizer.param_groups[0]["params"][-1]
    train(
        *(job, lambda x: model(x) * temperature.sum(), optimizer),
        after_step=lambda _: job.record("temperature", temperature),
    )


@script(lambda model: optim.SGD(list(model.parameters())[2:], lr=0.1))
def parameters_outside_the_optimizer(job: Job, model: Any, optimizer: Any) -> None:
    """Gradients that no optimizer consumes add up, averaged anew at every step."""
    train(job, model, optimizer)
    job.record("gradients", gradients(model))


@script(adamw, when="after_step")
def two_steps_in_a_row(job: Job, model: Any, optimizer: Any, step: int) -> None:
    optimizer.step()


@script(sgd, when="step", steps=2 * STEPS)
def step_every_other_backward(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Without `no_sync`: what has been averaged is averaged again with what is added."""
    backward(job, model, step)
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()


@script(adamw, when="update")
def step_skipped(job: Job, model: Any, optimizer: Any, step: int) -> None:
    if step not in (2, 5):
        optimizer.step()


@script(partial(adamw, weight_decay=0.1))
def step_without_backward(job: Job, model: Any, optimizer: Any) -> None:
    """Horovod puts zeros where there is no gradient, so that decay and momentum move weights."""
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    train(job, model, optimizer, after_step=lambda _: (optimizer.zero_grad(), optimizer.step()))


@script(sgd, when="step")
def closure(job: Job, model: Any, optimizer: Any, step: int) -> None:
    evaluate = closure_of(job, model, optimizer, step)
    job.record("loss", optimizer.step(evaluate) if step % 2 else optimizer.step(closure=evaluate))


@script(sgd, when="update")
def closure_that_only_looks(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """Backward comes first; the closure says what the loss is, before the update."""
    job.record("loss", optimizer.step(lambda: model(job.inputs(step)).square().mean()))


@script(adamw, when="step", steps=2 * STEPS)
def closure_beside_no_sync(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """As trainers accumulate: the closure alone in no_sync(), and in step() for the last batch."""
    if step % 2:
        job.record("loss", optimizer.step(lambda: backward(job, model, step)))
    else:
        with model.no_sync():
            closure_of(job, model, optimizer, step)()


@script(lambda model: optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), when="step", steps=4)
def lbfgs(job: Job, model: Any, optimizer: Any, step: int) -> None:
    job.record("loss", optimizer.step(closure_of(job, model, optimizer, 0)))


@script(
    lambda model: optim.Muon(model.parameters(), lr=0.01),
    module=lambda: nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)),
)
def muon(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer)


class Shell(optim.Optimizer):
    """An optimizer in name only, as trainers put them around another one."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@script(adamw, wraps=False)
def delegating(job: Job, model: Any, inner: Any) -> None:
    shell = job.wrap(Shell(inner), model)
    train(job, model, inner, steps=2)
    train(job, model, shell, first_step=2, zero_grad=inner.zero_grad)


def beside_one_that_steps_whole(job: Job) -> None:
    model = job.ddp(mlp())
    parameters = list(model.parameters())
    whole = job.wrap(SignDescent(parameters[3:], lr=0.01), model)
    other = job.wrap(optim.AdamW(parameters[:3], lr=0.01), model)
    for step in range(STEPS):
        model.zero_grad()
        backward(job, model, step)
        for optimizer in (other, whole) if step % 2 else (whole, other):
            optimizer.step()
    job.record_state(model, whole, other)


@script(sgd, wraps=False)
def step_hooks(job: Job, model: Any, optimizer: Any) -> None:
    """The user's own hooks: how often they run, and what they see."""
    first = next(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: job.record("before", [first, first.grad]))
    optimizer.register_step_post_hook(lambda *_: job.record("after", [first, first.grad]))
    job.wrap(optimizer, model)
    optimizer.register_step_post_hook(lambda *_: job.record("last", first))
    train(job, model, optimizer)


@script(adamw, wraps=False)
def hooks_that_write(job: Job, model: Any, optimizer: Any) -> None:
    """The user's own hooks, there before the wrap, replace gradients and write to weights."""
    parameters = list(model.parameters())

    def halve(*_: Any) -> None:
        for parameter in parameters[::2]:
            parameter.grad = parameter.grad * 0.5

    @torch.no_grad()
    def shrink(*_: Any) -> None:
        for parameter in parameters:
            parameter.mul_(0.99)

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(shrink)
    job.wrap(optimizer, model)
    train(job, model, optimizer)


def grad_scaler(job: Job, name: str, device: str = "cpu") -> None:
    """`GradScaler`, with an overflow on one rank that every rank has to notice."""
    kind, arguments = SPLITTABLE[name]
    model = job.ddp(mlp())
    optimizer = job.wrap(kind(model.parameters(), **arguments), model)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16, enabled=device == "cuda"):
            loss = model(job.inputs(step)).square().mean()
        if step == 3 and job.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            job.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        job.record("scale", scaler.get_scale())
    job.record_state(model, optimizer)


@script(sgd, when="passes")
def sharpness_aware(job: Job, model: Any, optimizer: Any, step: int) -> Tensor:
    """Two backward passes per step, at the weights and uphill from them."""
    backward(job, model, step)
    parameters = list(model.parameters())
    uphill = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in parameters]
    with torch.no_grad():
        for p, shift in zip(parameters, uphill, strict=True):
            p.add_(shift)
    optimizer.zero_grad()
    loss = backward(job, model, step)
    with torch.no_grad():
        for p, shift in zip(parameters, uphill, strict=True):
            p.sub_(shift)
    return loss


@script(adamw, wraps=False)
def step_pre_hooks(job: Job, model: Any, optimizer: Any, made: str) -> None:
    """Hooks that clip gradients and set the learning rate for the step about to be made."""

    def clip(*_: Any) -> None:
        job.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    def warm_up(*_: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.8

    if made == "after":
        job.wrap(optimizer, model)
    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_pre_hook(warm_up)
    if made == "before":
        job.wrap(optimizer, model)
    train(job, model, optimizer)


@script(sgd)
def global_step_hooks(job: Job, model: Any, optimizer: Any) -> None:
    """Hooks on the steps of all optimizers, as profilers register them."""
    first = next(model.parameters())
    seen: list[Tensor] = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(first.detach().clone()))
    try:
        train(job, model, optimizer)
    finally:
        handle.remove()
    job.record("seen", seen)


class Counting(TorchFunctionMode):
    """Counts the operations on lists that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func.__name__.startswith("_foreach")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def switched(switch: Callable[[Any], object], on: Any, off: Any) -> Iterator[None]:
    switch(on)
    try:
        yield
    finally:
        switch(off)


other_default_dtype = partial(switched, torch.set_default_dtype, torch.float64, torch.float32)

#: in which a step may be taken: what numbers depend on, and an optimizer that shows it
SURROUNDINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], optim.Optimizer]]] = {
    "autocast": (
        partial(torch.autocast, "cpu", torch.bfloat16),
        lambda model: optim.Adafactor(model.parameters(), lr=0.01),
    ),
    "denormals": (
        partial(switched, torch.set_flush_denormal, True, False),
        partial(sgd, lr=1e-39, momentum=0.0),
    ),
    "default_device": (partial(torch.device, "cpu"), adamw),
    "inference": (torch.inference_mode, sgd),
    "no_grad": (torch.no_grad, sgd),
}


def stepped_within(job: Job, name: str) -> None:
    around, optimizer_of = SURROUNDINGS[name]
    module = mlp()
    nn.init.zeros_(list(module.parameters())[-1])
    model, optimizer = job.begin(optimizer_of, module)

    def update(step: int) -> None:
        with around() if step else contextlib.nullcontext():
            optimizer.step()

    train(job, model, optimizer, update=update)
    job.record_state(model, optimizer)


@script(adamw, when="update")
def default_dtype_changed(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """A state is made in the default dtype: that of ``step()``, and not what follows."""
    optimizer.state.clear()
    with other_default_dtype() if step % 2 else contextlib.nullcontext():
        optimizer.step()
    with other_default_dtype():
        job.record_state(model, optimizer)


@script(partial(sgd, foreach=True), when="update")
def mode_around_step(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """A mode of the script's own sees the operations of the step."""
    with Counting() as mode:
        optimizer.step()
    job.record("seen", mode.seen)


def step_compiled(job: Job, kind: str, backend: str) -> None:
    """`step()` of a wrapped optimizer under `torch.compile`."""
    torch._dynamo.reset()
    model = job.ddp(mlp())
    optimizer = job.wrap({"sgd": sgd, "adamw": adamw}[kind](model), model)
    step: Any = torch.compile(optimizer.step, backend=backend)
    for number in range(STEPS):
        closure_of(job, model, optimizer, number)()
        step()
    job.record_state(model, optimizer)
