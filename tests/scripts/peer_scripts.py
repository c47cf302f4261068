"""Training scripts and probes that went wrong with earlier schedulers of this kind."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from hazard_scripts import Peer, free_steps, held_backward
from looks import weight
from plugin_suite import PluginContract, TrainingRun
from torch import Tensor, nn
from training import Job, adamw, frozen, mlp, script, sgd, train

import bytesched


@script(sgd, when="before_step")
def forward_between_backward_and_step(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """A second forward pass, with and without gradients, before the step."""
    with torch.set_grad_enabled(bool(step % 2)):
        job.record("loss", model(job.inputs(100 + step)).square().mean())


class LastFirst(nn.Module):
    """Registers its layers in the reverse order of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.tail, self.middle, self.front = nn.Linear(16, 4), nn.Linear(16, 16), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Any:
        return self.tail(torch.tanh(self.middle(torch.tanh(self.front(x)))))


@script(sgd, module=LastFirst)
def registered_last_first(job: Job, model: Any, optimizer: Any) -> None:
    train(job, model, optimizer)


def figures(fields: dict[str, Any]) -> dict[str, Any]:
    """The figures of a short run."""
    job = Job(wrapped=True, **fields)
    train(job, *job.begin(sgd))
    job.close()
    return job.stats


def cpu_while_waiting(seconds: float) -> float:
    """CPU seconds this process burns while a read waits `seconds` for the peer."""
    job = Job(wrapped=True)
    peer = Peer(job, reader=0)
    model, optimizer = job.begin(sgd)
    free_steps(job, model, optimizer)
    held_backward(job, peer, model)
    optimizer.step()
    timer = threading.Timer(seconds, peer.let_go)
    timer.start()
    began_s = time.process_time()
    frozen(weight(model))
    burnt_s = time.process_time() - began_s
    timer.join()
    job.close()
    return burnt_s


def footprint(model: Any, optimizer: Any) -> dict[str, Any]:
    """What wrapping might leave behind: hooks, classes, threads."""
    return {
        "hooks": [
            len(hooks)
            for m in model.modules()
            for hooks in (
                m._forward_pre_hooks,
                m._forward_hooks,
                m._backward_hooks,
                m._state_dict_pre_hooks,
                m._state_dict_hooks,
                m._load_state_dict_pre_hooks,
            )
        ],
        "optimizer": [
            len(hooks) for name, hooks in sorted(vars(optimizer).items()) if name.endswith("_hooks")
        ],
        "classes": [type(p).__name__ for p in model.parameters()],
        "tensors": [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()],
        "state": type(optimizer.state).__name__,
        "grads": [p.grad is None or type(p.grad) is Tensor for p in model.parameters()],
        "step": optimizer.step.__qualname__,
        "threads": sorted(t.name for t in threading.enumerate()),
    }


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.rest = nn.Parameter(torch.ones(8)), nn.Linear(8, 4)
        self.skip = False

    def forward(self, x: Tensor) -> Any:
        return self.rest(x if self.skip else x * self.front)


@script(adamw, Skipping, when="after_step", find_unused_parameters=True)
def unseen_front_parameter(job: Job, model: Any, optimizer: Any, step: int) -> None:
    """The first parameter is unused in some steps; steps are counted all the same."""
    model.module.skip = step % 2 == 0


def never_wrapped() -> list[Any]:
    """What flush, unwrap and stats do with an object that was never wrapped."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    bytesched.flush(optimizer)
    return [bytesched.unwrap(optimizer) is optimizer, bytesched.stats(optimizer)["mode"]]


def contracted(
    job: Job, model: Any, optimizer: Any, wrap: Callable[..., object], **more: Callable[[], object]
) -> TrainingRun:
    """A training for the suite that every plugin passes; ``more``: what wrapping might change."""
    steps = itertools.count()

    def state() -> dict[str, object]:
        everything = {
            "records": job.records,
            "weights": frozen(model.state_dict()),
            "optimizer": frozen(optimizer.state_dict()),
        }
        return {name: pickle.dumps(as_lists(value)) for name, value in everything.items()}

    def touched() -> dict[str, object]:
        return footprint(model, optimizer) | {name: look() for name, look in more.items()}

    return TrainingRun(
        step=lambda: train(job, model, optimizer, steps=1, first_step=next(steps)),
        state=state,
        footprint=touched,
        wrap=lambda: wrap(optimizer, model),
        flush=bytesched.flush,
        unwrap=job.close,
        stats=lambda: bytesched.stats(optimizer),
    )


class DDPContract(PluginContract):
    def training(self) -> TrainingRun:
        job = Job(wrapped=True)
        model = job.ddp(mlp())
        return contracted(job, model, adamw(model), job.wrap)


def as_lists(value: Any) -> Any:
    """The same with tensors as lists of numbers, which compare and pickle by value."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    return value


def contract(name: str) -> None:
    """One test of the suite."""
    getattr(DDPContract(), name)()
