"""Turns of the soak, as each rank runs them: drawn from a seed, and what they leave behind."""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scripts_gradients
import scripts_models
import scripts_optimizers
import scripts_reading
import scripts_split
import torch
import torch.distributed as dist
from dropped_models import held, own_threads, settles
from restless import RestlessJob
from torch import nn
from training import Job, compare

_MODULES = (scripts_gradients, scripts_models, scripts_optimizers, scripts_reading, scripts_split)
#: need arguments of DDP or of the job that are not drawn here
_LEFT_OUT = frozenset({"called_by_method", "different_starts", "subgroups"})
#: of doubles, as far as training makes it grow
_ROUNDING = 1e-6
_ROUNDED_NORMS = 1e-5


def scripts() -> dict[str, Callable[..., None]]:
    """The training scripts of the suite that need nothing but a job, by module and name."""
    return {
        f"{module.__name__}.{name}": script
        for module in _MODULES
        for name, script in inspect.getmembers(module, inspect.isfunction)
        if script.__module__ == module.__name__ and name not in _LEFT_OUT and _is_whole(script)
    }


def _is_whole(script: Callable[..., None]) -> bool:
    names = list(inspect.signature(script).parameters)
    given = ["job", "model", "optimizer", "step"] if hasattr(script, "__wrapped__") else ["job"]
    return names[:1] == ["job"] and names == given[: len(names)]


def same(script: tuple[str, str], args: tuple[Any, ...], options: dict[str, Any]) -> list[str]:
    """Where a wrapped run differs from a plain one; of more than two ranks, beyond rounding."""
    restless = options.pop("restless", False)
    kind = RestlessJob if restless else Job
    if dist.get_world_size() == 2:
        # Norms of a tensor of which each rank has a part are rounded otherwise.
        is_rounded = Path(script[0]).stem == "scripts_hostile" and options.get("shard")
        return compare(script, args, options, _ROUNDED_NORMS if is_rounded else 0.0, kind)[0]
    # Gloo adds up what three ranks have in an order that depends on where chunks are cut.
    torch.set_default_dtype(torch.float64)
    try:
        return compare(script, args, options, _ROUNDING, kind)[0]
    finally:
        torch.set_default_dtype(torch.float32)


def left() -> tuple[int, int, int]:
    """Threads, descriptors and resident KiB of this process, once what ends has ended."""
    settles(lambda: own_threads() == 0)
    _compile_once()
    gc.collect()
    # What malloc keeps of freed memory goes up and down by a hundred MB.
    ctypes.CDLL(None).malloc_trim(0)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (*held(), resident_pages * os.sysconf("SC_PAGE_SIZE") // 1024)


@functools.cache
def _compile_once() -> None:
    """The compiler takes 30 MB, whenever the first script that asks for it is drawn."""
    torch.compile(torch.neg, backend="eager")(torch.ones(1))


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
        return (*held(), len(gc.get_objects()))

    # By now the story that the scheduler keeps is as long as it gets.
    before = iterate(100)
    after = iterate(count)
    job.close()
    return tuple(now - then for now, then in zip(after, before, strict=True))  # type: ignore[return-value]
