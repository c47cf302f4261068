"""What a rank does in the tests of waves: the same training with waves and without."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from raised import prints_and_ends, raised
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import bytesched
from bytesched.plugins.wave import TickTock

WIDTH = 12
CLASSES = 5
STEPS = 6
#: some steps have larger gradients
CLIPPED_AT = 0.3
SMALL: dict[str, Any] = {"partition_bytes": 256, "credit_bytes": 512, "timeout_s": 100.0}

Batch = tuple[Tensor, Tensor]


class Tied(nn.Module):
    """A weight used twice, one that only some batches use, a frozen one, dropout and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.25)
        self.often = nn.Linear(WIDTH, WIDTH)
        self.seldom = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.exit = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, *, seldom: bool = False) -> Tensor:
        x = self.dropout(functional.relu(self.norm(self.entry(x))))
        x = self.often(functional.relu(self.often(x)))
        if seldom:
            x = x + self.seldom(x)
        logits: Tensor = self.exit(self.frozen(x) + self.entry(x))
        return logits


def plain_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, CLASSES),
    )


def tied_model() -> nn.Module:
    torch.manual_seed(3)
    return Tied()


def batch_of(step: int, rank: int = 0, size: int = 24) -> Batch:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(size, WIDTH, generator=generator)
    return inputs, torch.randint(CLASSES, (size,), generator=generator)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def seldom_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Uses ``seldom`` in the part of the batch that begins with a positive number."""
    inputs, targets = batch
    logits = model(inputs, seldom=bool(inputs[0, 0] > 0))
    return functional.cross_entropy(logits, targets)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def accumulated(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    waves: int,
    rank: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    update: Callable[[], object] | None = None,
) -> list[Tensor]:
    """Losses of gradient accumulation as one would write it."""
    optimizer = optimizer or optimizer_of(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = list(zip(*(t.split(24 // waves) for t in batch_of(step, rank)), strict=True))
        total = []
        for wave, part in enumerate(parts):
            last = wave == waves - 1
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = last
            loss = loss_fn(model, part) * (1 / waves)
            loss.backward()
            total.append(loss.detach())
        (update or optimizer.step)()
        losses.append(torch.stack(total).sum())
    return losses


def clipping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_AT)
        optimizer.step()

    return update


def in_waves(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    waves: int,
    rank: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> list[Tensor]:
    optimizer = optimizer or optimizer_of(model)
    options = {"overlap": True, **options}
    wave = TickTock(model, optimizer, loss_fn, waves=waves, **options)
    losses = [wave.step(batch_of(step, rank)) for step in range(STEPS)]
    wave.close()
    return losses


def state_of(model: nn.Module) -> dict[str, Tensor]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: value.clone() for name, value in inner.state_dict().items()}


def differences(expected: nn.Module, found: nn.Module) -> list[str]:
    """Names of what is not the same, bit for bit."""
    a, b = state_of(expected), state_of(found)
    return [name for name in a if not torch.equal(a[name], b[name])]


# -- on several ranks ----------------------------------------------------------------------


def ddp_equal(waves: int, wrapped: bool, clipped: bool = False) -> list[str]:
    """DDP alone or under bytesched, in waves, against DDP with no_sync."""
    rank = dist.get_rank()
    expected = DistributedDataParallel(plain_model())
    optimizer = optimizer_of(expected)
    update = clipping(expected, optimizer) if clipped else None
    torch.manual_seed(rank)
    losses = accumulated(expected, loss_of, waves, rank, optimizer, update)
    model = DistributedDataParallel(plain_model())
    optimizer = optimizer_of(model)
    if wrapped:
        bytesched.wrap(optimizer, model, **SMALL)
    update = clipping(model, optimizer) if clipped else None
    torch.manual_seed(rank)
    found = in_waves(model, loss_of, waves, rank, optimizer, update=update)
    bytesched.flush()
    wrong = differences(expected, model) + ["losses"] * (not all(map(torch.equal, losses, found)))
    if wrapped:
        if not clipped and not int(bytesched.stats(optimizer)["barrier_crossed_steps"]):
            wrong.append("barrier not crossed")
        bytesched.unwrap(optimizer)
    return wrong


def apart(
    make: Callable[[], nn.Module], loss_fn: Callable[[nn.Module, Any], Tensor], **options: Any
) -> tuple[bool, list[str]]:
    """Whether waves over DDP overlap, and what differs from accumulation."""
    rank = dist.get_rank()
    expected, model = make(), make()
    torch.manual_seed(rank)
    accumulated(expected, loss_fn, 2, rank)
    torch.manual_seed(rank)
    wave = TickTock(model, optimizer_of(model), loss_fn, overlap=True, **options)
    for step in range(STEPS):
        wave.step(batch_of(step, rank))
    wave.close()
    return wave.overlaps, differences(expected, model)


def switched_off() -> tuple[bool, list[str]]:
    return apart(lambda: DistributedDataParallel(plain_model()), loss_of, enabled=False)


def left_to_accumulation() -> tuple[bool, list[str]]:
    """find_unused_parameters with parameters that only some waves use."""
    make = partial(DistributedDataParallel, find_unused_parameters=True)
    return apart(lambda: make(tied_model()), seldom_loss)


def averaged_by_hand(model: nn.Module, batches: list[Batch], rank: int) -> None:
    """Trains with the mean over the ranks of gradients accumulated on each."""
    optimizer = optimizer_of(model)
    torch.manual_seed(rank)
    for inputs, targets in batches:
        optimizer.zero_grad()
        for part in zip(inputs.split(12), targets.split(12), strict=True):
            (seldom_loss(model, part) * 0.5).backward()
        for parameter in model.parameters():
            if parameter.requires_grad:
                used = torch.tensor(float(parameter.grad is not None))
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                grad.div_(2)
                dist.all_reduce(grad)
                dist.all_reduce(used)
                parameter.grad = grad if used else None
        optimizer.step()


def seldom_used_under_wrap() -> list[str]:
    """A plain module under bytesched: what only an early wave used is averaged as well."""
    rank = dist.get_rank()
    models, batches = [], [batch_of(step, rank) for step in range(STEPS)]
    for overlap in (True, False):
        model = tied_model()
        optimizer = optimizer_of(model)
        bytesched.wrap(optimizer, model, find_unused_parameters=True, **SMALL)
        wave = TickTock(model, optimizer, seldom_loss, overlap=overlap)
        torch.manual_seed(rank)
        for batch in batches:
            wave.step(batch)
        wave.close()
        bytesched.unwrap(optimizer)
        models.append(model)
    reference = tied_model()
    averaged_by_hand(reference, batches, rank)
    weights = dict(reference.named_parameters())
    return [
        f"{place} {name}"
        for place, model in enumerate(models)
        for name, value in model.named_parameters()
        if not torch.equal(value, weights[name])
    ]


def refused_where_nothing_sends(**options: Any) -> str:
    model = plain_model()
    return raised(lambda: TickTock(model, optimizer_of(model), loss_of, **options))


def refused_where_it_is_off() -> str:
    return refused_where_nothing_sends(enabled=False)


def peer_dies() -> None:
    """Rank 1 dies in its second wave; the other one says how its training ended."""
    rank = dist.get_rank()
    model = plain_model()
    optimizer = optimizer_of(model)
    bytesched.wrap(optimizer, model, **SMALL | {"timeout_s": 8.0})
    wave = TickTock(model, optimizer, dying_in(loss_of, 10, rank == 1), overlap=True)
    prints_end(wave, lambda step: wave.step(batch_of(step, rank)))


def dying_in(loss_fn: Callable[..., Tensor], call: int, dies: bool) -> Callable[..., Tensor]:
    """A loss in whose call of that number this process dies."""
    calls = count(1)

    def loss(*args: Any) -> Tensor:
        if next(calls) == call and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_fn(*args)

    return loss


def prints_end(waves: Any, step: Callable[[int], object]) -> NoReturn:
    """Prints how the training ended, and ends what is left of it."""

    def train() -> None:
        try:
            for number in range(50):
                step(number)
        finally:
            waves.close()

    prints_and_ends(train, Exception)
