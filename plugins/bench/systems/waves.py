"""The waves of one rank, measured: one big batch, accumulation and tick-tock."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bytesched
from bytesched.bench.profile import parse_profile
from bytesched.bench.specification import WaveSpecification

from ...wave.ticktock.activations import ActivationMemory
from ...wave.ticktock.ticktock import TickTock
from ..workloads.models import Workload
from ..workloads.waves import emulated, real
from .data_parallel import make_optimizer

__all__ = ["SYSTEMS", "measure"]

#: what is measured, and with how many ranks at least
SYSTEMS = {
    "one-batch": 1,
    "accumulation": 1,
    "tick-tock": 1,
    "tick-tock+bytesched": 2,
}

_SEED = 1


def measure(spec: WaveSpecification, system: str) -> dict[str, Any]:
    """One turn of a system on a new model: times in ms, losses, and the activation memory."""
    waves = spec.waves
    whole = system == "one-batch"
    workload = _workload(spec, waves if whole else 1)
    model: nn.Module = workload.model
    ranks = dist.get_world_size()
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = make_optimizer("sgd", workload.model.parameters())
    if system == "tick-tock+bytesched":
        bytesched.wrap(optimizer, model, guard=False)
    wave = None
    if not whole:
        overlap = system != "accumulation"
        wave = TickTock(model, optimizer, workload.loss, waves=waves, overlap=overlap)

    def step(number: int) -> Tensor:
        seeds = [(number * ranks + dist.get_rank()) * waves + index for index in range(waves)]
        if wave is not None:
            return wave.step(*seeds)
        optimizer.zero_grad()
        loss = workload.loss(model, seeds[0])
        loss.backward()
        optimizer.step()
        return loss.detach()

    found = _timed(step, spec.warmup, spec.iterations)
    with ActivationMemory(workload.model.parameters()) as memory:
        step(0)
    if wave is not None:
        wave.close()
    if system == "tick-tock+bytesched":
        bytesched.unwrap(optimizer)
    return found | {"activation_bytes": memory.peak_bytes}


def _workload(spec: WaveSpecification, batches: int) -> Workload:
    torch.manual_seed(_SEED)
    if spec.emulate:
        return emulated(parse_profile(spec.emulate, "of the bench"), spec.slots)
    return real(spec.model, spec.batch * batches)


def _timed(step: Callable[[int], Tensor], warmup: int, iterations: int) -> dict[str, Any]:
    starts_s: list[float] = []
    losses: list[float] = []
    for number in range(warmup + iterations + 1):
        starts_s.append(time.perf_counter())
        losses.append(step(number).item())
    spans_s = [after - before for before, after in pairwise(starts_s[warmup:])]
    return {"iteration_ms": [1e3 * span_s for span_s in spans_s], "losses": losses}
