"""Training scripts that are interrupted, end early, or ask for what cannot be."""

from __future__ import annotations

import atexit
import gc
import weakref
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from looks import weight
from raised import raised
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import Job, adamw, gradients, mlp, script, sgd, train

import bytesched
from bytesched.plugins.planned.session import PlannedSession
from bytesched.plugins.registry import sessions


class Interrupted(Exception):
    """What the user's code raises."""


@script(adamw, when="step", steps=8)
def interrupted(job: Job, model: Any, optimizer: Any, step: int, where: str) -> None:
    def at(moment: str) -> None:
        if step in (3, 5) and moment == where:
            raise Interrupted

    handle = model.module[2].register_forward_hook(lambda *_: at("forward"))
    try:
        optimizer.zero_grad()
        loss = model(job.inputs(step)).square().mean()
        at("before_backward")
        loss.backward()
        at("before_step")
        optimizer.step()
        at("after_step")
    except Interrupted:
        job.record("interrupted", step)
    handle.remove()


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
    model, optimizer = job.begin(sgd)
    train(job, model, optimizer, steps=4)
    model.to(dtype)
    optimizer.zero_grad()
    model(job.inputs(4).to(dtype)).square().mean().backward()
    job.record("gradients", gradients(model))


def errors_of_wrong_modules() -> list[str]:
    """What `wrap` says to a module around the DDP object, and to the one inside it."""
    job = Job(wrapped=True)
    model = job.ddp(mlp())
    wrong = nn.ModuleDict({"ddp": model}), model.module
    errors = [
        raised(partial(job.wrap, sgd(model), module), bytesched.PluginError) for module in wrong
    ]
    job.close()
    return errors


def nothing_kept() -> list[bool]:
    job = Job(wrapped=True)
    model, optimizer = job.begin(adamw)
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
        model, optimizer = job.begin(sgd, Reused)
        said = raised(partial(train, job, model, optimizer), Exception)
        kinds.append(said.partition(":")[0])
        raised(job.close)
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
