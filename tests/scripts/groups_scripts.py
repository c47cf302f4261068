"""Training in which each rank has experts of its own, which some ranks reduce among themselves."""

from __future__ import annotations

import copy
import functools
import math
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from raised import prints_and_ends, raised
from scripts_gradients import compressing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import SMALL, Job, adamw, backward

import bytesched

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
STEPS = 10


def whole(gradient: Tensor) -> Tensor:
    """Such that four of them have one sum, in whatever order."""
    return (gradient * 2**16).round() / 2**16


class Experts(nn.ModuleList):
    """Those of one rank."""

    data_parallel_group: Any


class Layer(nn.Module):
    """A gate and two experts, of which `used` run: what they get differs from rank to rank."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        with torch.random.fork_rng():
            torch.manual_seed(100 + place)
            self.experts = Experts([nn.Linear(8, 8) for _ in range(2)])
        self.used = [True, True]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.gate(x))
        for expert, is_used in zip(self.experts, self.used, strict=True):
            if is_used:
                x = x + torch.tanh(expert(x))
        return x


class Model(nn.Module):
    """Dense layers around two of those."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Layer(place + 10 * n) for n in range(2)])
        self.last = nn.Linear(8, 4)
        for parameter in self.parameters():
            parameter.register_hook(whole)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)

    @property
    def expert_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    @property
    def experts(self) -> list[Experts]:
        return [layer.experts for layer in self.expert_layers]

    def expert_parameters(self) -> list[nn.Parameter]:
        return [parameter for experts in self.experts for parameter in experts.parameters()]


def grid(ways: int) -> Any:
    """The group of ranks that have the experts of this one, which are spread over so many ranks.

    None: no other.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    if ways == size:
        return None
    groups = [dist.new_group(list(range(place, size, ways))) for place in range(ways)]
    return groups[rank % ways]


def ignoring(model: Model) -> Model:
    """The same, whose experts are none of DDP's business."""
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


class Training:
    def __init__(self, job: Job, how: str, ways: int, **arguments: Any) -> None:
        self.job = job
        self.model = Model(dist.get_rank() % ways)
        self.group = grid(ways)
        self.ways = ways
        self.groups: dict[nn.Parameter, Any] = dict.fromkeys(
            self.model.expert_parameters(), self.group
        )
        self.fields: dict[str, Any] = {}
        if how == "attribute":
            for experts in self.model.experts:
                experts.data_parallel_group = self.group
        elif how == "modules":
            self.fields["groups"] = dict.fromkeys(self.model.experts, self.group)
        else:
            self.fields["groups"] = dict(self.groups)
        self.ddp = job.ddp(ignoring(self.model) if ways > 1 else self.model, **arguments)
        self.by_hand = not job.wrapped
        #: what gradients of experts travel in, if not in their own
        self.wire: torch.dtype | None = None

    def wrap(self, kind: str, parameters: Iterable[nn.Parameter] = ()) -> Any:
        made = OPTIMIZERS[kind](list(parameters) or list(self.model.parameters()))
        return self.job.wrap(made, self.ddp, **self.fields)

    def reduce(self) -> None:
        """What a plain script does with gradients of experts."""
        for parameter, group in self.groups.items() if self.by_hand and self.ways > 1 else ():
            used = torch.tensor([int(parameter.grad is not None)])
            if group is not None:
                dist.all_reduce(used, group=group)
            if used.item():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                sent = parameter.grad.to(self.wire or parameter.dtype).div_(dist.get_world_size())
                if group is not None:
                    dist.all_reduce(sent, group=group)
                parameter.grad.copy_(sent)

    def passes(self, step: int) -> Tensor:
        loss: Tensor = self.ddp(self.job.inputs(step)).square().mean()
        loss.backward()
        self.reduce()
        return loss

    def step(self, step: int, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = self.passes(step)
        for optimizer in optimizers:
            optimizer.step()
        self.job.record(f"loss {step}", loss)

    def steps(self, steps: range, *optimizers: torch.optim.Optimizer) -> None:
        for step in steps:
            self.step(step, *optimizers)

    def whole(self, *optimizers: torch.optim.Optimizer, steps: int = STEPS) -> None:
        """The usual loop, and its end."""
        self.steps(range(steps), *optimizers)
        self.end(*optimizers)

    def end(self, *optimizers: torch.optim.Optimizer) -> None:
        self.job.record_state(self.ddp, *optimizers)
        self.job.record("gradients", [parameter.grad for parameter in self.model.parameters()])


def grouped(kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a script of a function of a `Training`, its optimizer and the number of the step."""

    def made(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(job: Job, ways: int) -> None:
            training = Training(job, "attribute", ways)
            optimizer = training.wrap(kind)
            for step in range(STEPS):
                function(training, optimizer, step)
            training.end(optimizer)

        return run

    return made


def trained(
    job: Job, how: str, ways: int, kind: str, arguments: Mapping[str, Any] = MappingProxyType({})
) -> None:
    training = Training(job, how, ways, **arguments)
    training.whole(training.wrap(kind))


def compiled(job: Job, ways: int) -> None:
    training = Training(job, "attribute", ways)
    training.ddp = torch.compile(training.ddp, backend="eager")
    training.whole(training.wrap("adamw"))


def begun_apart(job: Job, ways: int) -> None:
    """A plain module begins with what the first rank of each group has."""
    training = Training(job, "attribute", ways)
    for parameter in training.model.expert_parameters():
        parameter.data += dist.get_rank()
        if training.by_hand and training.group is not None:
            dist.broadcast(parameter.data, dist.get_rank() % ways, group=training.group)
    if job.wrapped:
        for parameter in training.model.first.parameters():
            parameter.data += dist.get_rank()
    optimizer = training.wrap("sgd")
    job.record_state(training.ddp)
    training.whole(optimizer, steps=3)


def compressed(job: Job, ways: int, wire: str) -> None:
    """As DDP's hooks compress, which the script does for experts, too."""
    training = Training(job, "attribute", ways)
    training.wire, bits = {"fp16": (torch.float16, 9), "bf16": (torch.bfloat16, 6)}[wire]

    def short(gradient: Tensor) -> Tensor:
        """Such that four of them have one sum in the wire's dtype, in whatever order."""
        return ((gradient * 2.0**bits).round() / 2.0**bits).clamp(-0.5, 0.5)

    for parameter in training.model.parameters():
        if parameter not in training.groups:
            parameter.register_hook(short)
    compressing(job, training.ddp, wire)
    training.whole(training.wrap("momentum"))


def two_partitions(job: Job) -> None:
    """The experts of two layers are divided in two ways; those of one have no other rank."""
    training = Training(job, "attribute", 2)
    second = training.model.experts[1]
    second.data_parallel_group = None
    training.groups.update(dict.fromkeys(second.parameters()))
    training.whole(training.wrap("momentum"))


@grouped("adamw")
def kept_gradients(training: Training, optimizer: Any, step: int) -> None:
    """Gradients are zeros between rounds, and experts are left out now and then."""
    optimizer.zero_grad(set_to_none=False)
    for layer in training.model.expert_layers:
        layer.used = [True, step % 3 != 2]
    training.passes(step)
    optimizer.step()


@grouped("adamw")
def unused(training: Training, optimizer: Any, step: int) -> None:
    """Experts that one rank of a group uses, or none, or of all groups none."""
    rank, ways = dist.get_rank(), training.ways
    for number, layer in enumerate(training.model.expert_layers):
        layer.used = [
            (step + number) % 4 != 3,
            (step + number + rank // ways) % 3 != 0 and not (step % 4 == 2 and rank % ways == 0),
        ]
    training.step(step, optimizer)
    training.job.record("none", [p.grad is None for p in training.model.parameters()])


@grouped("momentum")
def accumulated(training: Training, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    for part in range(2):
        with training.ddp.no_sync():
            backward(training.job, training.ddp, 3 * step + part)
    training.passes(3 * step + 2)
    optimizer.step()


@grouped("momentum")
def clipped(training: Training, optimizer: Any, step: int) -> None:
    """By the norm of what this rank has, as torch does it."""
    optimizer.zero_grad()
    training.passes(step)
    norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
    training.job.record("norm", norm)
    optimizer.step()


@grouped("sgd")
def in_a_closure(training: Training, optimizer: Any, step: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        return training.passes(step)

    training.job.record("loss", optimizer.step(closure))


def scaled(job: Job, ways: int) -> None:
    """A scaler; one gradient of an expert overflows, on the ranks that have it."""
    training = Training(job, "attribute", ways)
    optimizer = training.wrap("momentum")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    overflown = training.model.expert_parameters()[0]
    for step in range(STEPS):
        optimizer.zero_grad()
        overflows = step == 4 and dist.get_rank() == 1
        handle = overflown.register_hook(lambda g, by=math.inf if overflows else 1.0: g * by)
        scaler.scale(training.ddp(job.inputs(step)).square().mean()).backward()
        training.reduce()
        scaler.step(optimizer)
        scaler.update()
        job.record("scale", scaler.get_scale())
        handle.remove()
    training.end(optimizer)


def two_optimizers(job: Job, ways: int, how: str) -> None:
    """One for experts, which steps every other time, and one for the rest."""
    training = Training(job, how, ways)
    dense = [p for p in training.model.parameters() if p not in training.groups]
    first = training.wrap("adamw", dense)
    second = training.wrap("momentum", training.groups)
    for step in range(STEPS):
        training.step(step, *((first, second) if step % 2 else (first,)))
    training.end(first, second)


def saved_and_loaded(job: Job, ways: int) -> None:
    """A checkpoint in the middle, a flush, and plain training after `unwrap`."""
    training = Training(job, "attribute", ways)
    optimizer = training.wrap("adamw")
    training.steps(range(4), optimizer)
    saved = copy.deepcopy((training.ddp.state_dict(), optimizer.state_dict()))
    job.record("saved", [saved[1], *saved[0].values()])
    training.steps(range(4, 6), optimizer)
    if job.wrapped:
        bytesched.flush(optimizer)
    job.record_state(training.ddp, optimizer)
    training.ddp.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    training.steps(range(6, 9), optimizer)
    job.unwrap(optimizer)
    training.by_hand = True
    training.steps(range(9, 12), optimizer)
    training.end(optimizer)


# -- what is refused ---------------------------------------------------------------------


def refused(case: str) -> str:
    """What `wrap` says on this rank; on four, or two."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Model(rank % 2)
    first: Any = model.experts[0]
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])] if size == 4 else [None, None]
    whole = dist.group.WORLD
    group = pairs[rank % 2]
    fields: dict[str, Any] = {"timeout_s": 60.0}
    for experts in model.experts:
        experts.data_parallel_group = group
    if case != "not ignored":
        ignoring(model)
    if case == "values":
        with torch.no_grad():
            model.expert_parameters()[3].add_(float(rank == 3))
    elif case == "one rank groups less" and rank == 1:
        del model.experts[1].data_parallel_group
    elif case == "one rank names all" and rank == 1:
        first.data_parallel_group = whole
    elif case == "other members":
        other = dist.new_group([0, 3]), dist.new_group([1, 2])
        mine = {0: pairs[0], 1: pairs[1], 2: other[1], 3: other[0]}[rank]
        for experts in model.experts:
            experts.data_parallel_group = mine
    elif case == "outside" and rank == 1:
        first.data_parallel_group = pairs[0]
    elif case == "two groups":
        fields["groups"] = {first[0].weight: whole}
    elif case == "unknown":
        fields["groups"] = {nn.Linear(2, 2): group}
    elif case == "no group" and rank == 1:
        fields["groups"] = {first: [1, 3]}
    elif case == "destroyed":
        gone = dist.new_group([0, 1])
        if rank < 2:
            dist.destroy_process_group(gone)
            first.data_parallel_group = gone
    elif case == "shard":
        fields[case] = True
    elif case in ("split", "hierarchy"):
        fields[case] = "on"
    elif case == "enabled":
        fields[case] = False
    root = DistributedDataParallel(model)

    def wrap() -> None:
        optimizer = bytesched.wrap(torch.optim.SGD(root.parameters(), lr=0.1), root, **fields)
        bytesched.unwrap(optimizer)

    said = raised(wrap)
    dist.barrier()
    return said


def other_groups_later() -> str:
    """A second optimizer is wrapped, with other groups than the first."""
    model = ignoring(Model(dist.get_rank()))
    ddp = DistributedDataParallel(model)
    ids = set(map(id, model.expert_parameters()))
    dense = torch.optim.SGD([p for p in model.parameters() if id(p) not in ids], lr=0.1)
    bytesched.wrap(dense, ddp, groups=dict.fromkeys(model.experts[:1]))
    late = torch.optim.SGD(model.expert_parameters(), lr=0.1)
    said = raised(lambda: bytesched.wrap(late, ddp, groups=dict.fromkeys(model.experts)))
    bytesched.unwrap(dense)
    return said


def dies(victim: int, moment: str) -> None:
    model = ignoring(Model(dist.get_rank() % 2))
    pairs = dist.new_group([0, 2]), dist.new_group([1, 3])
    for experts in model.experts:
        experts.data_parallel_group = pairs[dist.get_rank() % 2]
    ddp = DistributedDataParallel(model)
    optimizer = bytesched.wrap(adamw(ddp), ddp, **SMALL, timeout_s=100.0)

    def kill(_: Any = None) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        for step in range(6):
            is_last = step == 3 and dist.get_rank() == victim
            x = ddp(torch.ones(4, 8))
            if is_last and moment == "backward":
                model.expert_parameters()[0].register_post_accumulate_grad_hook(kill)
            x.square().mean().backward()
            if is_last:
                kill()
            optimizer.step()
        bytesched.flush()

    prints_and_ends(train)
