"""Turns of the soak, as each rank runs them: drawn from a seed, and what they leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import scripts_gradients
import scripts_models
import scripts_optimizers
import scripts_reading
import scripts_split
import torch
import torch.distributed as dist
from restless import RestlessJob
from scripts_optimizers import SPLITTABLE
from torch import nn
from training import Job, compare

from bytesched.errors import BytesschedError

#: need arguments of DDP or of the job that are not drawn here
_LEFT_OUT = frozenset({"called_by_method", "different_starts", "subgroups"})
#: the first error of a rank whose peer has raised comes long before, also on a busy machine
_TIMEOUT_S = 60.0
#: of doubles, as far as training makes it grow
_ROUNDING = 1e-6
#: a thread that has ended may be listed for a moment
_PATIENCE_S = 5.0

MOMENTS = ("forward", "backward", "before_step", "after_step")


def scripts() -> dict[str, Callable[..., None]]:
    """The training scripts of the suite that need nothing but a job, by module and name."""
    found = {}
    for module in (
        scripts_gradients,
        scripts_models,
        scripts_optimizers,
        scripts_reading,
        scripts_split,
    ):
        for name, script in inspect.getmembers(module, inspect.isfunction):
            is_own = script.__module__ == module.__name__ and not name.startswith("_")
            if is_own and list(inspect.signature(script).parameters) == ["job"]:
                found[f"{module.__name__}.{name}"] = script
    return {name: script for name, script in found.items() if name.split(".")[1] not in _LEFT_OUT}


class Fault(Exception):
    """Raised by the user's code, at a moment that was drawn."""


def wander(job: Job, seed: str, fault: tuple[int, int, str] | None = None) -> None:
    """Trains a model that is drawn from `seed`, and does what is drawn in between.

    Args:
        fault: the rank that raises `Fault`, the step, and when in it.
    """
    draw = random.Random(seed)
    alone = random.Random(f"{seed} {job.rank}")
    widths = [draw.choice((1, 3, 8, 17, 64, 150)) for _ in range(draw.randint(2, 6))]
    layers: list[nn.Module] = []
    for before, after in zip([8, *widths], widths, strict=False):
        layers += [nn.Linear(before, after, bias=draw.random() < 0.8), nn.Tanh()]
        if draw.random() < 0.3:
            layers.append(draw.choice((nn.LayerNorm, nn.BatchNorm1d))(after))
    model = job.ddp(nn.Sequential(*layers))
    kind, arguments = SPLITTABLE[draw.choice(sorted(SPLITTABLE))]
    optimizer = job.wrap(kind(model.parameters(), **arguments), model)
    for step in range(draw.randint(3, 12)):
        moment = fault[2] if fault is not None and fault[:2] == (job.rank, step) else ""
        optimizer.zero_grad(set_to_none=draw.random() < 0.7)
        if draw.random() < 0.2:
            with model.no_sync():
                model(job.inputs(100 + step)).square().mean().backward()
        loss = model(job.inputs(step)).square().mean()
        _raise_at("forward", moment)
        with _raising_hook(model, moment):
            loss.backward()
        if draw.random() < 0.2:
            job.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        if alone.random() < 0.2:
            _grad(model, alone).sum().item()
        _raise_at("before_step", moment)
        optimizer.step()
        _raise_at("after_step", moment)
        if alone.random() < 0.3:
            alone.choice(list(model.parameters())).sum().item()
        if alone.random() < 0.1:
            optimizer.state_dict()
        if draw.random() < 0.2:
            optimizer.param_groups[0]["lr"] *= 0.9
        if draw.random() < 0.1:
            with torch.no_grad():
                model.eval()(job.inputs(step))
                model.train()
        job.record("loss", loss)
    job.record_state(model, optimizer)


def _grad(model: nn.Module, alone: random.Random) -> torch.Tensor:
    grad = alone.choice(list(model.parameters())).grad
    assert grad is not None
    return grad


def _raise_at(moment: str, now: str) -> None:
    if moment == now:
        raise Fault(moment)


@contextlib.contextmanager
def _raising_hook(model: nn.Module, moment: str) -> Iterator[None]:
    if moment != "backward":
        yield
        return

    def raise_fault(grad: torch.Tensor) -> None:
        raise Fault("backward")

    parameters = list(model.parameters())
    handle = parameters[len(parameters) // 2].register_hook(raise_fault)
    try:
        yield
    finally:
        handle.remove()


def same(script: tuple[str, str], args: tuple[Any, ...], options: dict[str, Any]) -> list[str]:
    """Where a wrapped run differs from a plain one; of more than two ranks, beyond rounding."""
    restless = options.pop("restless", False)
    kind = RestlessJob if restless else Job
    if dist.get_world_size() == 2:
        return compare(script, args, options, kind=kind)[0]
    # Gloo adds up what three ranks have in an order that depends on where chunks are cut.
    torch.set_default_dtype(torch.float64)
    try:
        return compare(script, args, options, _ROUNDING, kind)[0]
    finally:
        torch.set_default_dtype(torch.float32)


def faulty(seed: str, fault: tuple[int, int, str], options: dict[str, Any]) -> str:
    """What this rank raised in a wrapped run, and nothing if the fault was never reached."""
    job = Job(wrapped=True, timeout_s=_TIMEOUT_S, **options)
    raised = ""
    try:
        wander(job, seed, fault)
    except (BytesschedError, Fault) as error:
        raised = type(error).__name__
    with contextlib.suppress(BytesschedError):
        job.close()
    dist.barrier()
    return raised


def killed(seed: str, fault: tuple[int, int, str], options: dict[str, Any]) -> None:
    """In fresh processes: the rank that would raise is killed, the other prints what it raised."""
    job = Job(wrapped=True, timeout_s=_TIMEOUT_S, **options)
    try:
        wander(job, seed, fault)
    except Fault:
        os.kill(os.getpid(), signal.SIGKILL)
    except BytesschedError as error:
        print(type(error).__name__)
    else:
        print("nothing")


def left() -> tuple[int, int, int]:
    """Threads, descriptors and resident KiB of this process, once what ends has ended."""
    deadline_s = time.monotonic() + _PATIENCE_S
    gc.collect()
    while _has_own_threads() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    # What malloc keeps of freed memory goes up and down by a hundred MB.
    ctypes.CDLL(None).malloc_trim(0)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        resident_pages * os.sysconf("SC_PAGE_SIZE") // 1024,
    )


def left_by_iterations(count: int, options: dict[str, Any]) -> tuple[int, int, int]:
    """How many threads, descriptors and objects so many more iterations leave."""
    job = Job(wrapped=True, **options)
    model = job.ddp(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)))
    optimizer = job.wrap(torch.optim.AdamW(model.parameters()), model)

    def iterate(times: int) -> tuple[int, int, int]:
        for step in range(times):
            optimizer.zero_grad()
            model(job.inputs(step)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        optimizer.state_dict()
        gc.collect()
        threads, descriptors = (len(os.listdir(f"/proc/self/{of}")) for of in ("task", "fd"))
        return threads, descriptors, len(gc.get_objects())

    # By now the story that the scheduler keeps is as long as it gets.
    before = iterate(100)
    after = iterate(count)
    job.close()
    return tuple(now - then for now, then in zip(after, before, strict=True))  # type: ignore[return-value]


def _has_own_threads() -> bool:
    return any(thread.name.startswith("bytesched-") for thread in threading.enumerate())
