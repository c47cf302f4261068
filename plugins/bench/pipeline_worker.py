"""One rank of a pipeline of `bytesched bench --pipeline`.

``python -m bytesched.plugins.bench.pipeline_worker SPECIFICATION PLACE``
"""

from __future__ import annotations

import gc
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

import bytesched
from bytesched.bench.pipelining import (
    AT_THE_END,
    BYTESCHED,
    DDP,
    SEARCHED,
    PipelineSpecification,
    facts,
    pipeline_of,
    placements,
    predict,
    stage_shapes,
)
from bytesched.bench.profile import ELEMENT_BYTES, parse_profile
from bytesched.environment import rank_view
from bytesched.errors import PluginError
from bytesched.lab.ranks import Place
from bytesched.pipeline.order import Order
from bytesched.pipeline.replay import replay
from bytesched.pipeline.search import search
from bytesched.pipeline.stages import Link, Pipeline
from bytesched.records import from_json

from ..pipelines.loading import ordered_schedule
from ..pipelines.orders import torch_order
from .block import SEED
from .leaving import leave_after
from .link import PROBE_BYTES
from .systems.data_parallel import make_optimizer
from .workloads.emulated import Pace
from .workloads.stages import EmulatedStage

__all__ = ["main"]

_PROBES: Final = 5
_CROSSINGS: Final = 20
#: of the search for an order
_SEARCH_S: Final = 5.0

_TORCHS: Final[dict[str, Callable[..., Any]]] = {
    "1f1b": lambda stages, count, loss_fn: schedules.Schedule1F1B(
        stages[0], count, loss_fn=loss_fn
    ),
    "interleaved": lambda stages, count, loss_fn: schedules.ScheduleInterleaved1F1B(
        stages, count, loss_fn=loss_fn
    ),
    "zbv": lambda stages, count, loss_fn: schedules.ScheduleZBVZeroBubble(
        stages, count, loss_fn=loss_fn
    ),
}

#: what torch calls them
_NAMES: Final = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}


@dataclass
class _Training:
    """Stages of this rank, ready to train."""

    modules: list[nn.Module]
    stages: list[PipelineStage]
    schedule: Any
    optimizer: torch.optim.Optimizer


class PipelineBench:
    """Trains with every schedule and in each of the ways, on every rank the same."""

    def __init__(self, spec: PipelineSpecification) -> None:
        self._spec = spec
        ranks, size = spec.ranks, dist.get_world_size()
        self._replica, self._place = divmod(dist.get_rank(), ranks)
        self._count = size // ranks
        rows = [list(range(first, first + ranks)) for first in range(0, size, ranks)]
        self._pipeline: Any = [dist.new_group(row) for row in rows][self._replica]
        columns = [list(range(place, size, ranks)) for place in range(ranks)]
        self._replicas: Any = [dist.new_group(column) for column in columns][self._place]
        profile = parse_profile(spec.profile, "of the bench")
        self._reduced_per_s, self._crossing_s = self._measured()
        scale = spec.compute_scale
        if spec.comm_ratio:
            scale = profile.nbytes / self._reduced_per_s / (profile.compute_s * spec.comm_ratio)
        self._profile = profile.scaled(scale)
        self._pipelines = {name: self._pipeline_of(name) for name in placements(ranks)}
        self._orders: dict[str, Order] = {}

    def run(self) -> dict[str, Any]:
        """The result, on every rank."""
        spec = self._spec
        for name, its_name in _NAMES.items():
            per_rank = len(self._pipelines[name].stages) // spec.ranks
            order = torch_order(its_name, spec.ranks, per_rank, spec.micro_batches)
            self._orders[name] = order
        if searched := self._searched():
            self._orders[SEARCHED] = searched
        found = {
            name: {
                **facts(self._orders[name], self._pipelines[name]),
                "iteration_ms": {arm: [] for arm in self._arms(name)},
                "same_bits": dict.fromkeys(self._arms(name), True),
                "bits": {},
                "figures": {},
            }
            for name in self._orders
        }
        for turn in range(self._spec.rounds):
            for name, its in found.items():
                # It is not the same link after some minutes.
                self._reduced_per_s, self._crossing_s = self._measured()
                predict(its, self._orders[name], self._pipeline_of(name))
                expected: list[str] = []
                for arm in its["iteration_ms"]:
                    took_ms, bits, figures = self._block(name, arm)
                    expected = expected or bits
                    its["iteration_ms"][arm].append(took_ms)
                    its["same_bits"][arm] &= bits == expected
                    its["bits"][arm] = bits
                    its["figures"][arm] = figures
                    self._say(turn, f"{name}, {arm}", took_ms)
        whole = self._pipelines["1f1b"]
        return {
            "compute_ms": 1e3 * self._profile.compute_s / self._spec.ranks,
            "reduction_ms": 1e3 * statistics.mean(map(whole.reduction_s, range(self._spec.ranks))),
            "crossing_ms": 1e3 * self._crossing_s,
            "schedules": found,
        }

    def _pipeline_of(self, name: str) -> Pipeline:
        """The stages of a schedule, over the link that was measured last."""
        spec = self._spec
        bytes_per_s = self._reduced_per_s * 2 * (self._count - 1) / self._count
        latency_s = max(0.0, self._crossing_s - spec.boundary_bytes / bytes_per_s)
        link = Link(bytes_per_s, latency_s)
        return pipeline_of(self._profile, placements(spec.ranks)[name], spec, link, self._count)

    def _arms(self, name: str) -> list[str]:
        """DDP reduces nothing where weight gradients are computed apart."""
        split = self._orders[name].splits_backward
        return [AT_THE_END, BYTESCHED] if split else [AT_THE_END, DDP, BYTESCHED]

    def _searched(self) -> Order | None:
        """The best order that was found which holds no more than torch's own for these stages.

        None where nothing is installed that searches.
        """
        pipeline = self._pipelines[SEARCHED]
        known = self._orders["zbv"]
        text = [""]
        if dist.get_rank() == 0:
            try:
                found = search(
                    pipeline,
                    self._spec.micro_batches,
                    memory_bytes=max(replay(known, pipeline).peak_bytes),
                    split_backward=True,
                    time_limit_s=_SEARCH_S,
                    known=[known],
                )
                text = [found.order.to_csv()]
            except PluginError as error:
                print(f"no searched order: {error}", flush=True)
        dist.broadcast_object_list(text, src=0)
        return Order.parse(text[0], "the order that was found") if text[0] else None

    def _set_up(self, name: str, arm: str) -> _Training:
        pipeline = self._pipelines[name]
        shapes = stage_shapes(self._profile, len(pipeline.stages))
        pace = Pace(host_is_beside=True)
        mine = pipeline.on(self._place)
        modules: list[nn.Module] = [
            EmulatedStage(shapes[stage], _times_s(pipeline, stage), pace, SEED + stage)
            for stage in mine
        ]
        parameters = [p for module in modules for p in module.parameters()]
        if arm == DDP:
            modules = [self._in_ddp(module) for module in modules]
        device = torch.device("cpu")
        stages = [
            PipelineStage(module, stage, len(shapes), device, group=self._pipeline)
            for stage, module in zip(mine, modules, strict=True)
        ]
        if name in _TORCHS:
            schedule = _TORCHS[name](stages, self._spec.micro_batches, _loss)
        else:
            schedule = ordered_schedule(stages, self._orders[name], _loss)
        optimizer = make_optimizer(self._spec.optimizer, parameters)
        return _Training(modules, stages, schedule, optimizer)

    def _in_ddp(self, module: nn.Module) -> nn.Module:
        """The stage in DDP, whose reducer only the schedule prepares, for the last backward.

        With ``require_backward_grad_sync`` the forward that infers shapes prepares it as well: the
        first backward of all is reduced too, so that gradients are sums of other parts, and in a
        stage whose forwards all come before it the next iteration ends in an error of torch's
        reducer (2.13; rebuilt parameter indices).
        """
        found = DistributedDataParallel(module, process_group=self._replicas)
        found.require_backward_grad_sync = False
        return found

    def _block(self, name: str, arm: str) -> tuple[float, list[str], dict[str, Any]]:
        """Trains from the beginning: ms of an iteration, bits of every rank, figures."""
        training = self._set_up(name, arm)
        modules, optimizer = training.modules, training.optimizer
        if arm == BYTESCHED:
            bytesched.wrap(  # type: ignore[call-overload]
                optimizer, training.schedule, groups=self._replicas, **self._spec.options
            )
        dist.barrier()
        warmup, iterations = self._spec.warmup, self._spec.iterations
        losses: list[float] = []
        for step in range(warmup + iterations):
            if step == warmup:
                began_s = time.perf_counter()
            optimizer.zero_grad()
            losses += self._step(training, step)
            if arm == AT_THE_END:
                for module in modules:
                    self._reduce(module)
            optimizer.step()
        # Of bytesched, what is outstanding crosses into this.
        took_ms = 1e3 * (time.perf_counter() - began_s) / iterations
        figures: dict[str, Any] = {}
        if arm == BYTESCHED:
            bytesched.flush(optimizer)
            figures = bytesched.stats(optimizer)
            bytesched.unwrap(optimizer)
        digest = hashlib.sha256(json.dumps(losses).encode())
        for module in modules:
            for parameter in module.parameters():
                digest.update(parameter.detach().numpy().tobytes())
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (took_ms, digest.hexdigest()[:16]))
        del training, modules, optimizer
        gc.collect()
        return max(took for took, _ in every), [bits for _, bits in every], figures

    def _step(self, training: _Training, step: int) -> list[float]:
        generator = torch.Generator().manual_seed(step * self._count + self._replica)
        width = self._spec.boundary_bytes // ELEMENT_BYTES
        x = torch.randn(self._spec.micro_batches, width, generator=generator)
        places = [stage.stage_index for stage in training.stages]
        losses: list[Tensor] = []
        is_last = training.stages[0].num_stages - 1 in places
        training.schedule.step(
            *([x] if 0 in places else []),
            target=x if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        return [float(loss.detach()) for loss in losses]

    def _reduce(self, module: nn.Module) -> None:
        """The mean of a stage's gradients, as one bucket."""
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        bucket = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(bucket, group=self._replicas)
        bucket /= self._count
        parts = bucket.split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))

    def _measured(self) -> tuple[float, float]:
        """Bytes per second of all-reduces of replicas, and seconds of a boundary, as all know."""
        buffer = torch.zeros(PROBE_BYTES // ELEMENT_BYTES)
        taken_s = []
        for _ in range(1 + _PROBES):
            dist.barrier()
            began_s = time.perf_counter()
            dist.all_reduce(buffer, group=self._replicas)
            taken_s.append(time.perf_counter() - began_s)
        crossings_s = self._crossings_s()
        found = [PROBE_BYTES / statistics.median(taken_s[1:]), statistics.median(crossings_s)]
        dist.broadcast_object_list(found, src=0)
        return found[0], found[1]

    def _crossings_s(self) -> list[float]:
        """Seconds that a boundary takes between the first two ranks of a pipeline, both ways."""
        boundary = torch.zeros(self._spec.boundary_bytes // ELEMENT_BYTES)
        taken_s = []
        first = self._replica * self._spec.ranks
        dist.barrier()
        for _ in range(_CROSSINGS if self._place < 2 else 0):
            began_s = time.perf_counter()
            other = first + 1 - self._place
            for sends in (self._place == 0, self._place == 1):
                if sends:
                    dist.send(boundary, other, group=self._pipeline)
                else:
                    dist.recv(boundary, other, group=self._pipeline)
            taken_s.append((time.perf_counter() - began_s) / 2)
        return taken_s or [0.0]

    def _say(self, turn: int, what: str, took_ms: float) -> None:
        if dist.get_rank() == 0:
            print(f"round {turn + 1}/{self._spec.rounds}  {what:<24} {took_ms:.1f} ms", flush=True)


def _times_s(pipeline: Pipeline, stage: int) -> tuple[float, float, float]:
    times = pipeline.stages[stage]
    return times.forward_s, times.input_gradient_s, times.weight_gradient_s


def _loss(output: Tensor, _target: Tensor) -> Tensor:
    return output.square().mean()


def main(argv: list[str]) -> int:
    """Run one rank; rank 0 writes the result into the file that its place names."""
    spec, place = from_json(PipelineSpecification, argv[0]), from_json(Place, argv[1])
    if spec.threads:
        torch.set_num_threads(spec.threads)
    dist.init_process_group("gloo", timeout=timedelta(seconds=spec.timeout_s))
    result = PipelineBench(spec).run()
    if rank_view().rank == 0:
        Path(place.result).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave_after(main)
