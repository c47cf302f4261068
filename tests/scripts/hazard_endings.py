"""Training scripts that are interrupted, end early, or ask for what cannot be."""

from __future__ import annotations

import atexit
import contextlib
import gc
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from looks import weight
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import Job, adamw, mlp, script, sgd, train

import bytesched
from bytesched.plugins.planned.session import PlannedSession
from bytesched.plugins.registry import sessions


class Interrupted(Exception):
    """What the user's code raises."""


@script(adamw, when="step", steps=8)
def interrupted(job: Job, model: Any, optimizer: Any, step: int, where: str) -> None:
    """An exception on every rank in the middle of a step, caught; training goes on."""
    raising = step in (3, 5)
    handle = None
    try:
        optimizer.zero_grad()
        if raising and where == "forward":
            handle = model.module[2].register_forward_hook(interrupt)
        loss = model(job.inputs(step)).square().mean()
        if raising and where == "before_backward":
            raise Interrupted
        loss.backward()
        if raising and where == "before_step":
            raise Interrupted
        optimizer.step()
        if raising and where == "after_step":
            raise Interrupted
    except Interrupted:
        job.record("interrupted", step)
    if handle:
        handle.remove()


def interrupt(*_: Any) -> None:
    raise Interrupted


def patience_s() -> list[float]:
    """How long a model waits whose group has a timeout, where nothing else is said, and where."""
    group = dist.new_group(timeout=timedelta(seconds=77))
    found = []
    settings: list[dict[str, Any]] = [{}, {"timeout_s": 55.0}]
    for fields in settings:
        model = DistributedDataParallel(mlp(), process_group=group)
        optimizer = bytesched.wrap(adamw(model), model, **fields)
        (session,) = sessions(model)
        assert isinstance(session, PlannedSession)
        found.append(session._wire.timeout_s)
        bytesched.unwrap(optimizer)
    return found


def converted(job: Job, dtype: torch.dtype) -> None:
    """A model that is converted in mid-training, by whom the reducer was not told."""
    model = job.ddp(mlp())
    optimizer = job.wrap(sgd(model), model)
    train(job, model, optimizer, steps=4)
    model.to(dtype)
    optimizer.zero_grad()
    loss = model(job.inputs(4).to(dtype)).square().mean()
    loss.backward()
    job.record("gradients", [p.grad for p in model.parameters()])


class Holder(nn.Module):
    """A module that holds the DDP object, as trainers do."""

    def __init__(self, ddp: nn.Module) -> None:
        super().__init__()
        self.ddp = ddp


def errors_of_wrong_modules() -> list[str]:
    """What `wrap` says to a module around the DDP object, and to the one inside it."""
    job = Job(wrapped=True)
    model = job.ddp(mlp())
    errors = []
    for module in (Holder(model), model.module):
        try:
            job.wrap(sgd(model), module)
        except bytesched.PluginError as error:
            errors.append(str(error))
    job.close()
    return errors


def nothing_kept() -> list[bool]:
    """Whether model, parameters and optimizer are gone once unwrapped and let go."""
    job = Job(wrapped=True)
    model = job.ddp(mlp())
    optimizer = job.wrap(adamw(model), model)
    train(job, model, optimizer)
    job.close()
    kept = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(weight(model))]
    del job, model, optimizer
    gc.collect()
    return [reference() is None for reference in kept]


class Reused(nn.Module):
    """One layer inside two reentrant checkpoints: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.layer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        x = self.head(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@script(sgd, module=Reused, static_graph=True)
def reused_in_static_graph(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer)


def errors_of_reused() -> list[str]:
    """What a plain and a wrapped run say when DDP was not told that the graph is static."""
    kinds = []
    for wrapped in (False, True):
        job = Job(wrapped=wrapped)
        model = job.ddp(Reused())
        optimizer = job.wrap(sgd(model), model)
        try:
            train(job, model, optimizer)
        except (RuntimeError, bytesched.PluginError) as error:
            kinds.append(type(error).__name__)
        with contextlib.suppress(bytesched.BytesschedError):
            job.close()
    return kinds


def ends_with_a_step(wrapped: bool) -> None:
    """A script that ends right after its last step, and prints what its weights are at the end."""
    job = Job(wrapped=wrapped)
    model = job.ddp(mlp())
    memory = [p.detach().numpy() for p in model.parameters()]
    # Registered before the first wrap, so it runs after what bytesched does at exit.
    atexit.register(lambda: print([array.tobytes().hex() for array in memory]))
    optimizer = job.wrap(adamw(model), model)
    train(job, model, optimizer)


def skipped_on_one_rank(timeout_s: float) -> None:
    """A loss that one rank alone finds unfit: it skips backward and step, and goes on."""
    job = Job(wrapped=True, timeout_s=timeout_s)
    model = job.ddp(mlp())
    optimizer = job.wrap(sgd(model), model)
    try:
        for step in range(8):
            optimizer.zero_grad()
            loss = model(job.inputs(step)).square().mean()
            if step == 4 and job.rank == 1:
                continue
            loss.backward()
            optimizer.step()
        bytesched.flush()
    except bytesched.BytesschedError as error:
        print(f"{type(error).__name__}: {error}")
