"""Turns of the soak, as each rank runs them: drawn from a seed, and what they leave behind."""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import os
import random
import sys
import threading
import time
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
from torch.nn.parallel import DistributedDataParallel
from training import Job, compare

import bytesched

_MODULES = (scripts_gradients, scripts_models, scripts_optimizers, scripts_reading, scripts_split)
#: need arguments of DDP or of the job that are not drawn here
_LEFT_OUT = {"called_by_method", "different_starts", "norms_of_nested_passes"}
if not hasattr(torch.optim, "Muon"):
    _LEFT_OUT.add("muon")
#: of doubles, as far as training makes it grow
_ROUNDING = 1e-6


def scripts() -> dict[str, Callable[..., None]]:
    """The training scripts of the suite that need nothing but a job, by module and name."""
    return {
        f"{module.__name__}.{name}": script
        for module in _MODULES
        for name, script in inspect.getmembers(module, inspect.isfunction)
        if script.__module__ == module.__name__ and name not in _LEFT_OUT and _is_whole(script)
    }


def _is_whole(script: Callable[..., None]) -> bool:
    parameters = inspect.signature(script).parameters.values()
    names = [each.name for each in parameters if each.default is inspect.Parameter.empty]
    given = ["job", "model", "optimizer", "step"] if hasattr(script, "__wrapped__") else ["job"]
    return names[:1] == ["job"] and names == given[: len(names)]


def same(script: tuple[str, str], options: dict[str, Any]) -> list[str]:
    """Where a wrapped run differs from a plain one; of more than two ranks, beyond rounding."""
    restless = options.pop("restless", False)
    kind = RestlessJob if restless else Job
    if dist.get_world_size() == 2:
        return compare(script, (), options, 0.0, kind)[0]
    # Gloo adds up what three ranks have in an order that depends on where chunks are cut.
    torch.set_default_dtype(torch.float64)
    try:
        return compare(script, (), options, _ROUNDING, kind)[0]
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


# -- a training that ends well, in ways that are drawn, while its ranks are busy -----------

#: Where nothing is stopped, nothing waits as long as that.
_TIMEOUT_S = 120.0

_ENDS = ("falls off", "destroys", "exits", "unwraps", "unwraps and destroys")

_MOMENTS = ("before clipping", "before step", "after step", "before end", "after end")


def ends_well(seed: str, options: dict[str, Any]) -> None:
    """Trains some rounds and ends; prints what it has trained."""
    draw = random.Random(seed)
    alone = random.Random(f"{seed} {dist.get_rank()}")
    # Also in rounds with a vote, and before there is anything to split.
    rounds, clips = draw.choice((1, 2, 3, 4, 6, 8)), draw.random() < 0.8
    late = {moment for moment in _MOMENTS if alone.random() < 0.25}
    torch.manual_seed(draw.randrange(1 << 30))
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters())
    bytesched.wrap(optimizer, ddp, timeout_s=_TIMEOUT_S, **options)

    def pass_(moment: str) -> None:
        if moment in late and step == rounds - 1:
            time.sleep(0.2 * alone.random())

    for step in range(rounds):
        optimizer.zero_grad()
        ddp(torch.randn(8, 32)).square().mean().backward()
        if step == rounds - 1:
            for _ in range(alone.choice((0, 0, 2, 6))):
                threading.Thread(target=_spin, daemon=True).start()
        pass_("before clipping")
        if clips:
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        pass_("before step")
        optimizer.step()
        pass_("after step")
    if draw.random() < 0.7:
        print(*(float(p.detach().double().sum()) for p in model.parameters()), flush=True)
    pass_("before end")
    end = draw.choice(_ENDS)
    if "unwraps" in end:
        bytesched.unwrap(optimizer)
    if "destroys" in end:
        dist.destroy_process_group()
    pass_("after end")
    if end == "exits":
        sys.exit(0)


def _spin() -> None:
    """Keeps this rank's other threads from running for a while."""
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        pass
