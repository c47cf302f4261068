"""Model parallelism, measured: stages that travel, against activations that do."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from bytesched.bench.profile import parse_profile
from bytesched.bench.specification import WaveSpecification

from ...wave.stages.cutting import balanced, layer_times_s
from ...wave.stages.model_waves import ModelWaves
from ..workloads.emulated import EmulatedModel
from ..workloads.models import CLASSES, IMAGE_SIZE, vgg
from .data_parallel import make_optimizer

__all__ = ["SYSTEMS", "measure"]

SYSTEMS = ("naive", "gpipe", "1f1b", "waves")

_SEED = 1


def measure(spec: WaveSpecification, system: str) -> dict[str, Any]:
    """One turn of a system on a new model: times in ms, losses, and figures of its own.

    In every step, as many batches are trained on as there are ranks.
    """
    torch.manual_seed(_SEED)
    model = _model(spec)
    step, close = (_waves if system == "waves" else _pipeline)(spec, system, model)
    starts_s: list[float] = []
    losses: list[float] = []
    for number in range(spec.warmup + spec.iterations + 1):
        starts_s.append(time.perf_counter())
        losses.append(step(number))
    spans_s = [after - before for before, after in pairwise(starts_s[spec.warmup :])]
    return {"iteration_ms": [1e3 * s for s in spans_s], "losses": losses, "stats": close()}


_Step = Callable[[int], float]
_Close = Callable[[], dict[str, Any]]


def _model(spec: WaveSpecification) -> nn.Sequential:
    if spec.emulate:
        return EmulatedModel(parse_profile(spec.emulate, "of the bench"))
    return vgg()


def _batch(spec: WaveSpecification, number: int, place: int) -> tuple[Tensor, Tensor]:
    """The batch that rank ``place`` has in step ``number``."""
    generator = torch.Generator().manual_seed(number * dist.get_world_size() + place)
    if spec.emulate:
        x = torch.randn(1, spec.activation_bytes // 4, generator=generator)
        return x, torch.zeros_like(x)
    size = spec.batch
    images = torch.randn(size, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    return images, torch.randint(CLASSES, (size,), generator=generator)


def _loss_fn(spec: WaveSpecification) -> Callable[[Tensor, Tensor], Tensor]:
    return functional.mse_loss if spec.emulate else functional.cross_entropy


def _waves(spec: WaveSpecification, system: str, model: nn.Sequential) -> tuple[_Step, _Close]:
    optimizer = make_optimizer("sgd", model.parameters())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    waves = ModelWaves(model, optimizer, _loss_fn(spec), _batch(spec, 0, 0)[0])

    def step(number: int) -> float:
        return waves.step(*_batch(spec, number, rank)).item() / ranks

    def close() -> dict[str, Any]:
        figures = waves.stats()
        waves.close()
        return figures

    return step, close


def _pipeline(spec: WaveSpecification, system: str, model: nn.Sequential) -> tuple[_Step, _Close]:
    """Stages of torch.distributed.pipelining, cut where their times are most even.

    ``naive`` lets one batch after another through the ranks, so that one computes at a time.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    times_s = torch.tensor(layer_times_s(list(model), _batch(spec, 0, 0)[0]))
    dist.broadcast(times_s, 0)
    bounds = balanced(len(model), ranks, lambda start, stop: float(times_s[start:stop].sum()))
    part = nn.Sequential(*list(model)[bounds[rank] : bounds[rank + 1]])
    optimizer = make_optimizer("sgd", part.parameters())
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    kind = Schedule1F1B if system == "1f1b" else ScheduleGPipe
    at_once = 1 if system == "naive" else ranks
    schedule = kind(stage, at_once, loss_fn=_loss_fn(spec), scale_grads=False)

    def step(number: int) -> float:
        optimizer.zero_grad()
        batches = [_batch(spec, number, place) for place in range(ranks)]
        losses: list[Tensor] = []
        for first in range(0, ranks, at_once):
            inputs, targets = (
                torch.cat(parts) for parts in zip(*batches[first : first + at_once], strict=True)
            )
            if rank == 0:
                schedule.step(inputs)
            elif rank == ranks - 1:
                found: list[Tensor] = []
                schedule.step(target=targets, losses=found)
                losses += found
            else:
                schedule.step()
        for parameter in part.parameters():
            if parameter.grad is not None:
                parameter.grad /= ranks
        optimizer.step()
        return sum(loss.item() for loss in losses) / ranks

    def close() -> dict[str, Any]:
        return {"peak_bytes": 2 * sum(p.nbytes for p in part.parameters())}

    return step, close
