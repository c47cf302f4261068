"""Models that are dropped without unwrap, and what of them stays behind."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from raised import raised
from torch import nn
from training import Job, mlp, sgd, train

import bytesched

#: a thread that has ended may be listed for a moment
_PATIENCE_S = 10.0


def held() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def settles(reached: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not reached():
        if time.monotonic() > deadline_s:
            return False
        gc.collect()
        time.sleep(0.01)
    return True


def _trained(kind: type[Job], *, reads: bool) -> weakref.ref[nn.Module]:
    job = kind(wrapped=True)
    model = job.ddp(mlp())
    train(job, model, job.wrap(sgd(model), model))
    if reads:
        model.state_dict()
    return weakref.ref(model)


def dropped_in_turn(count: int, reads: bool, kind: type[Job] = Job) -> list[str]:
    """What is left after each of `count` models in turn, each dropped after a few steps."""
    found = []
    _trained(kind, reads=reads)
    settles(lambda: own_threads() == 0)
    before = held()
    for turn in range(count):
        model = _trained(kind, reads=reads)
        if not settles(partial(is_gone, model, before)):
            names = [thread.name for thread in threading.enumerate()]
            found.append(f"turn {turn}: {held()}, was {before}; {names}; gone: {model() is None}")
    kind.barrier()
    return found


def is_gone(model: weakref.ref[nn.Module], before: tuple[int, int]) -> bool:
    threads, descriptors = held()
    return model() is None and threads <= before[0] and descriptors <= before[1]


def own_threads() -> int:
    return sum(thread.name.startswith("bytesched-") for thread in threading.enumerate())


def threads_of(count: int) -> list[int]:
    """The threads of this process with 0, 1, ... `count` models that are all in use."""
    gc.collect()
    settles(lambda: own_threads() == 0)
    job = Job(wrapped=True)
    kept = []
    numbers = [held()[0]]
    for _ in range(count):
        model, optimizer = job.begin(sgd)
        train(job, model, optimizer)
        kept.append(model)
        numbers.append(held()[0])
    job.close()
    return numbers


def last_step_of_a_dropped_model() -> bool:
    """Whether parameters that outlive their model have had its last step."""
    weights = []
    for wrapped in (False, True):
        job = Job(wrapped=wrapped)
        model, optimizer = job.begin(sgd)
        train(job, model, optimizer)
        parameters = list(model.parameters())
        if wrapped:
            del model, optimizer
            job._optimizers.clear()
            gc.collect()
        weights.append([parameter.detach().clone() for parameter in parameters])
    return all(torch.equal(plain, got) for plain, got in zip(*weights, strict=True))


def another_optimizer() -> bool:
    """Whether a model goes on under a second optimizer when the first one was dropped."""
    weights = []
    for wrapped in (False, True):
        job = Job(wrapped=wrapped)
        model = job.ddp(mlp())
        for lr in (0.1, 0.01):
            optimizer = job.wrap(torch.optim.SGD(model.parameters(), lr=lr), model)
            first = weakref.ref(optimizer)
            train(job, model, optimizer)
            job._optimizers.clear()
            del optimizer
            assert settles(lambda first=first: first() is None)  # type: ignore[misc]
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        bytesched.unwrap(model)
    return all(torch.equal(plain, got) for plain, got in zip(*weights, strict=True))


def left_alone(leaver: int) -> str:
    """What a rank raises that trains on after the other has unwrapped."""
    job = Job(wrapped=True, timeout_s=25.0)
    model, optimizer = job.begin(sgd)
    train(job, model, optimizer, steps=12)

    def train_on() -> None:
        train(job, model, optimizer)
        bytesched.flush(optimizer)

    said = "" if job.rank == leaver else raised(train_on)
    raised(job.close)
    dist.barrier()
    return said
