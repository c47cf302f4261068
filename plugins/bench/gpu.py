"""One rank of `bytesched bench --gpu-ranks`, of several that share a device.

``python -m bytesched.plugins.bench.gpu SPECIFICATION PLACE``. T* is measured: all gradients'
collectives and the compute of an iteration side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from bytesched.bench.gpu_ranks import nccl_variables
from bytesched.bench.specification import Specification
from bytesched.environment import set_variables
from bytesched.errors import PluginError
from bytesched.lab.ranks import Place
from bytesched.trace.reading import Trace, read_traces
from bytesched.trace.timeline import trace_name

from .block import SEED, iterate, reset_peak
from .rank import run_rank
from .systems.data_parallel import Running, make_optimizer
from .worker import Bench
from .workloads.models import build

#: of the collectives beside compute
_CHUNKS_MIB: Final = (25, 8)
_ELEMENTS_PER_MIB: Final = 2**18
#: iterations of a bound, and those before
_TIMED, _UNTIMED = 5, 2
#: after the warm-up, in which losses are compared
_COMPARED: Final = 4
#: that are traced; the last ones are whole
_TRACED: Final = 3


class GpuBench(Bench):
    """Measures systems on a GPU, or tiny models on the CPU in the same way."""

    def __init__(self, spec: Specification, place: Place) -> None:
        super().__init__(spec, place)
        urgent = None
        if self.is_on_gpu:
            urgent = dist.ProcessGroupNCCL.Options()
            urgent.is_high_priority_stream = True
        self._urgent: Any = dist.new_group(pg_options=urgent)

    def prepare(self) -> None:
        """Trains with kernels that give the same bits each time, where there are such."""
        torch.use_deterministic_algorithms(True, warn_only=True)
        for system in self.systems:
            block = self.block(system, self.spec.warmup, _COMPARED)
            self.results[system.label]["compared"] = block
        torch.use_deterministic_algorithms(False)

    def found(self) -> dict[str, Any]:
        device, carrier = "CPU", "Gloo"
        if self.is_on_gpu:
            version = ".".join(map(str, torch.cuda.nccl.version()))
            device, carrier = torch.cuda.get_device_name(0), f"NCCL {version} over sockets"
        return {"device": device, "carrier": carrier, **super().found()}

    def probe(self) -> None:
        """Times compute, an all-reduce of all gradients, and both at once.

        For the latter, nothing depends on anything, and an iteration begins when those before it
        have ended; collectives are of pieces, of which the better size counts.
        """
        reset_peak(is_on_gpu=self.is_on_gpu)
        workload = build(self.spec, SEED)
        parameters = list(workload.model.parameters())
        running = Running(workload.model, make_optimizer(parameters))
        arena = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)

        def compute() -> None:
            iterate(workload, running, self.seed_of(0), self.spec.clip)

        def reduce(elements: int, beside: Callable[[], None] = lambda: None) -> None:
            works = [
                dist.all_reduce(part, group=self._urgent, async_op=True)
                for part in arena.split(elements)
            ]
            beside()
            for work in works:
                work.wait()

        compute_ms = self._timed_ms(compute)
        reduction_ms = self._timed_ms(partial(reduce, len(arena)))
        both_ms = [
            self._timed_ms(partial(reduce, mib * _ELEMENTS_PER_MIB, compute)) for mib in _CHUNKS_MIB
        ]
        self.link.samples.append(1e3 * arena.nbytes / reduction_ms)
        self.compute_samples.append({"compute_ms": compute_ms, "optimum_ms": min(both_ms)})

    def _timed_ms(self, function: Callable[[], None]) -> float:
        """What a call takes in a row of them, the mean of the ranks."""
        for _ in range(_UNTIMED):
            function()
        self._synchronize()
        self.ranks.barrier()
        began_s = time.perf_counter()
        for _ in range(_TIMED):
            function()
        self._synchronize()
        return self.ranks.mean(1e3 * (time.perf_counter() - began_s) / _TIMED)

    def _synchronize(self) -> None:
        if self.is_on_gpu:
            torch.cuda.synchronize()

    def finish(self) -> None:
        """With ``--trace``, an iteration of each of bytesched's systems, by its timeline."""
        for number, system in enumerate(self.systems if self.spec.trace else ()):
            if system.kind == "bytesched":
                folder = Path(self.place.result).parent / f"trace{number}"
                options = system.options | {"timeline": str(folder)}
                self.block(replace(system, options=options), self.spec.warmup, _TRACED)
                [trace] = read_traces(folder / trace_name(self.ranks.rank))
                self.results[system.label]["trace"] = traced(trace)


def traced(trace: Trace) -> dict[str, list[Any]]:
    """The last iteration that is whole, in ms from the start of its backward pass to the next one.

    Chunks with when they were sent and there, gates with when the training thread came to them and
    went on, and passes with their starts; the last one is the end.
    """
    began_ms, until_ms = (span.start_ms for span in trace.track("backward")[-2:])

    def of(track: str) -> list[list[Any]]:
        return [
            [span.name, round(span.start_ms - began_ms, 3), round(span.end_ms - began_ms, 3)]
            for span in trace.track(track)
            if began_ms <= span.start_ms < until_ms
        ]

    passes = [[name, of(name)[0][1]] for name in ("backward", "step", "forward")]
    end = ["backward", round(until_ms - began_ms, 3)]
    return {"passes": [*passes, end], "chunks": of("send"), "gates": of("wait")}


def _prepare(spec: Specification, place: Place) -> str:
    """Before the driver is asked for anything, and NCCL for a group; the backend."""
    set_variables(nccl_variables(place.rank))
    if spec.device == "cpu":
        return "gloo"
    if not torch.cuda.is_available():
        raise PluginError("there is no CUDA device; --device cpu tries it without")
    torch.cuda.set_device(0)
    return "nccl"


if __name__ == "__main__":
    run_rank(Specification, lambda spec, place: GpuBench(spec, place).run(), _prepare)
