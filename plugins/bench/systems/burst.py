"""One rank of `scripts/measure-burst`: ``python -m bytesched.plugins.bench.systems.burst SPEC``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from bytesched.burst.compare import uniform_plan
from bytesched.burst.cost import Place, Plan
from bytesched.burst.graph import Branches, Chain, Curve, Layer, ModelGraph, load_graph
from bytesched.burst.planfile import parse_plan
from bytesched.records import from_json

from ...burst import Background, Burst
from ..leaving import leave_after
from ..workloads.device import Device, emulated_model

__all__ = ["BurstSpecification", "scaled"]

WIDTH = 8


def scaled(graph: ModelGraph, time_scale: float, byte_scale: float) -> ModelGraph:
    """The same model on slower devices, with fewer bytes."""

    def curve(old: Curve) -> Curve:
        return Curve(tuple((samples, round(ns * time_scale)) for samples, ns in old.points))

    def scaled_chain(chain: Chain) -> Chain:
        return tuple(
            replace(
                item,
                forward=curve(item.forward),
                backward=curve(item.backward),
                parameter_bytes=round(item.parameter_bytes * byte_scale),
                output_bytes=round(item.output_bytes * byte_scale),
            )
            if isinstance(item, Layer)
            else Branches(
                item.name,
                tuple(map(scaled_chain, item.branches)),
                round(item.output_bytes * byte_scale),
            )
            for item in chain
        )

    return replace(graph, chain=scaled_chain(graph.chain))


@dataclass(frozen=True, kw_only=True)
class BurstSpecification:
    """What `scripts/measure-burst` measures."""

    profile: str
    #: how much slower the emulated devices are, and how many bytes they send
    time_scale: float
    byte_scale: float
    #: of the background's slow-down
    limit: float
    background_ms: float
    #: the burst plan, as `plan_to_json` has it
    plan: object
    iterations: int
    rounds: int
    warmup: int
    #: folder for timelines
    timeline: str
    #: the file into which rank 0 writes what was found
    result: str


class Job:
    """A background job that really learns something, in steps of a given length."""

    def __init__(self, device: Device, step_s: float) -> None:
        self._device = device
        self._step_s = step_s
        self._generator = torch.Generator().manual_seed(1)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._model = nn.Linear(WIDTH, 1)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05)
        self.losses: list[float] = []

    def step(self) -> None:
        """One step."""
        x = torch.randn(4, WIDTH, generator=self._generator)
        loss = (self._model(x) - x.sum(1, keepdim=True)).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())
        self._device.run_background(self._step_s)

    def equals_solo_run(self) -> bool:
        """Whether a run of its own has the same losses."""
        solo = Job(Device(), 0.0)
        for _ in self.losses:
            solo.step()
        return solo.losses == self.losses


class Bench:
    """Measures the systems of a specification in turn, on every rank the same."""

    def __init__(self, spec: BurstSpecification) -> None:
        self.spec = spec
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        graph = load_graph([spec.profile], fixed_share=0.2)
        self.graph = scaled(graph, spec.time_scale, spec.byte_scale)
        self.step_s = spec.background_ms / 1e3
        self.turns = 0

    def run(self) -> dict[str, Any]:
        """Figures by system, a list with one entry per round."""
        found: dict[str, list[dict[str, Any]]] = {}
        planned = parse_plan(self.spec.plan, "plan")
        for _ in range(self.spec.rounds):
            systems: list[tuple[str, Callable[[], dict[str, Any]]]] = [
                ("data parallel", lambda: self.train(self.uniform(self.size), shared=False)),
                ("burst", lambda: self.train(planned, shared=False)),
                ("burst + background", lambda: self.train(planned, shared=True)),
            ]
            for width in self.graph.widths(self.size - 1):
                label = f"static {width}/{self.size - width}"
                systems.append((label, partial(self.divided, width)))
            for label, measure in systems:
                found.setdefault(label, []).append(measure())
        return found

    def uniform(self, width: int) -> Plan:
        """Data parallelism on so many ranks."""
        return uniform_plan(self.graph.chain, Place(0, width))

    def train(self, plan: Plan, *, shared: bool) -> dict[str, Any]:
        """Trains by a plan, with a background job in its gaps or without."""
        device = Device()
        job = Job(device, self.step_s)
        background = Background(job.step, slowdown_limit=self.spec.limit)
        with self.burst(plan, device, timeline=shared) as burst:
            if shared:
                burst.share(background)
            elapsed_s, ran = self.steps(burst, lambda: background.steps)
        background.close()
        share, equal = ran * self.step_s / elapsed_s, job.equals_solo_run()
        shares = self.gathered([share, float(equal)])
        return self.figures(elapsed_s, [part for part, _ in shares]) | {
            "slowdown": background.slowdown,
            "background_is_as_alone": all(equal for _, equal in shares),
        }

    def divided(self, width: int) -> dict[str, Any]:
        """Data parallelism on some ranks, background jobs on the others, for as long."""
        self.turns += 1
        store = distributed_c10d._get_default_store()
        done = f"divided {self.turns}"
        device = Device()
        with self.burst(self.uniform(width), device) as burst:
            dist.barrier()
            share = elapsed_s = 0.0
            if self.rank < width:
                elapsed_s, _ = self.steps(burst, lambda: 0)
                if self.rank == 0:
                    store.set(done, "1")
            else:
                job = Job(device, self.step_s)
                began_s = time.perf_counter()
                while not store.check([done]):
                    job.step()
                share = len(job.losses) * self.step_s / (time.perf_counter() - began_s)
        shares = self.gathered([share, elapsed_s])
        return self.figures(shares[0][1], [part for part, _ in shares])

    def burst(self, plan: Plan, device: Device, *, timeline: bool = False) -> Burst:
        """A new model on its ranks."""
        fields: dict[str, Any] = {"partition_bytes": 1 << 18, "credit_bytes": 1 << 19}
        if timeline:
            fields["timeline"] = self.spec.timeline
        return Burst(emulated_model(self.graph.chain, device), plan, _optimizer, _loss, **fields)

    def steps(self, burst: Burst, counter: Callable[[], int]) -> tuple[float, int]:
        """Seconds of the timed iterations, and by how much `counter` grew in them."""
        samples = torch.ones(self.graph.batch, 4)
        for _ in range(self.spec.warmup):
            burst.step(samples, samples)
        before, began_s = counter(), time.perf_counter()
        for _ in range(self.spec.iterations):
            burst.step(samples, samples)
        return time.perf_counter() - began_s, counter() - before

    def figures(self, elapsed_s: float, shares: list[float]) -> dict[str, Any]:
        """Throughput in devices; all ranks have rank 0's."""
        mean_ms = 1e3 * elapsed_s / self.spec.iterations
        return {
            "iteration_ms": mean_ms,
            "foreground": self.graph.single_device_ns / 1e6 / mean_ms,
            "background": sum(shares),
        }

    def gathered(self, values: list[float]) -> list[list[float]]:
        """The values of every rank."""
        mine = torch.tensor(values, dtype=torch.float64)
        everywhere = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everywhere, mine)
        return [part.tolist() for part in everywhere]


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().mean()


def main(arguments: list[str]) -> int:
    """Run one rank."""
    spec = from_json(BurstSpecification, arguments[0])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    found = Bench(spec).run()
    if dist.get_rank() == 0:
        Path(spec.result).write_text(json.dumps(found))
    dist.barrier()
    return 0


if __name__ == "__main__":
    leave_after(main)
