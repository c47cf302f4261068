"""One rank of `bytesched bench --gpu-ranks`, of several that share a device.

``python -m bytesched.plugins.bench.gpu_worker SPECIFICATION PLACE``
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

from bytesched.bench.gpu_ranks import nccl_variables
from bytesched.bench.specification import Specification
from bytesched.bench.systems import System
from bytesched.environment import set_variables
from bytesched.errors import PluginError
from bytesched.lab.ranks import Place
from bytesched.observe import Observer

from ..registry import session_of
from .block import SEED, peak_bytes, reset_peak
from .rank import Ranks, run_rank
from .systems.data_parallel import Running, make_optimizer, set_up
from .workloads.gpu import gpu_workload

#: of the collectives beside compute
_CHUNKS_MIB: Final = (25, 8)
_ELEMENTS_PER_MIB: Final = 2**18
#: iterations of a bound, and those before
_TIMED, _UNTIMED = 5, 2
#: after the warm-up, in which losses are compared
_COMPARED: Final = 4


class GpuBench:
    """Measures bounds and systems in turn, on every rank the same."""

    def __init__(self, spec: Specification) -> None:
        self._spec = spec
        self._on_gpu = spec.device == "cuda"
        self._device = torch.device("cuda", 0) if self._on_gpu else torch.device("cpu")
        #: for what ranks tell each other: it leaves the device alone
        self._control: Any = dist.new_group(backend="gloo")
        self._ranks = Ranks(self._control)
        urgent = None
        if self._on_gpu:
            urgent = dist.ProcessGroupNCCL.Options()
            urgent.is_high_priority_stream = True
        self._urgent: Any = dist.new_group(pg_options=urgent)
        #: when each was begun by the host
        self._passes: list[tuple[str, int]] = []
        self._workload = gpu_workload(
            spec.model, spec.batch, self._device, self._ranks.rank, is_small=not self._on_gpu
        )

    def run(self) -> dict[str, Any]:
        """The result, on every rank."""
        sizes = [p.numel() for p in self._workload.make().parameters()]
        say, rounds = self._ranks.say, self._spec.rounds
        device, carrier = "CPU", "Gloo"
        if self._on_gpu:
            version = ".".join(map(str, torch.cuda.nccl.version()))
            device, carrier = torch.cuda.get_device_name(0), f"NCCL {version} over sockets"
        count, sharing = self._ranks.size, self._spec.sharing
        say(f"{count} ranks on one device ({device}), which run {sharing}")
        found: dict[str, Any] = {
            "ranks": count,
            "device": device,
            "carrier": carrier,
            "torch": torch.__version__,
            "parameters": sum(sizes),
            "tensors": len(sizes),
            "batch": len(self._workload.batches[0][0]),
            "bounds": [],
        }
        systems: dict[str, dict[str, Any]] = {}
        # Kernels that give the same bits each time, where there are such.
        torch.use_deterministic_algorithms(True, warn_only=True)
        for system in self._spec.systems:
            losses = self._block(system, _COMPARED)["losses"]
            systems[system.label] = {"losses": self._ranks.gather(losses), "rounds": []}
            say(f"losses     {system.label:<18} {losses[-1]:.6f}")
        torch.use_deterministic_algorithms(False)
        for turn in range(rounds):
            found["bounds"].append(self._bounds())
            # There and back: what drifts is nobody's advantage.
            for system in self._spec.systems[:: -1 if turn % 2 else 1]:
                block = self._block(system, self._spec.iterations)
                systems[system.label]["rounds"].append(block)
                took_ms = statistics.median(block["iteration_ms"])
                say(f"round {turn + 1}/{rounds}  {system.label:<18} {took_ms:8.1f} ms")
        return found | {"systems": systems}

    def _bounds(self) -> dict[str, float]:
        """Milliseconds of compute alone, of an all-reduce of all gradients, and of both at once.

        The latter by MiB of the pieces that are reduced: nothing depends on anything, and an
        iteration begins when those before it have ended.
        """
        self._clear()
        model = self._model()
        optimizer = make_optimizer(model.parameters())
        count = sum(p.numel() for p in model.parameters())
        arena = torch.zeros(count, device=self._device)

        def compute() -> None:
            self._iterate(model, optimizer, 0)

        def reduce(elements: int, beside: Callable[[], None] = lambda: None) -> None:
            works = [
                dist.all_reduce(arena[at : at + elements], group=self._urgent, async_op=True)
                for at in range(0, count, elements)
            ]
            beside()
            for work in works:
                work.wait()

        cases: dict[str, Callable[[], None]] = {
            "compute": compute,
            "reduction": partial(reduce, count),
        }
        for mib in _CHUNKS_MIB:
            cases[f"both_{mib}"] = partial(reduce, mib * _ELEMENTS_PER_MIB, compute)
        return {name: self._timed_ms(case) for name, case in cases.items()}

    def _timed_ms(self, function: Callable[[], None]) -> float:
        """What a call takes in a row of them, the mean of the ranks."""
        for _ in range(_UNTIMED):
            function()
        self._synchronize()
        dist.barrier(self._control)
        began_s = time.perf_counter()
        for _ in range(_TIMED):
            function()
        self._synchronize()
        return self._ranks.mean(1e3 * (time.perf_counter() - began_s) / _TIMED)

    def _block(self, system: System, iterations: int) -> dict[str, Any]:
        """Trains from the beginning; what all ranks found, and the losses of this one."""
        self._clear()
        began_bytes = reset_peak()
        running = self._set_up(system)
        dist.barrier(self._control)
        warmup = self._spec.warmup
        marks: list[Any] = []
        losses: list[Tensor] = []
        for step in range(warmup + iterations + 1):
            if step == warmup:
                began_s = time.process_time()
            elif step == warmup + iterations:
                cpu_ms = 1e3 * (time.process_time() - began_s) / iterations
            marks.append(self._mark())
            losses.append(self._iterate(running.module, running.optimizer, step))
        found: dict[str, Any] = {}
        if self._spec.trace and system.kind == "bytesched":
            found["trace"] = self._trace(running)
        peak = torch.cuda.max_memory_allocated() if self._on_gpu else peak_bytes() - began_bytes
        figures = running.close()
        self._synchronize()
        times = [self._between_ms(one, other) for one, other in pairwise(marks[warmup:])]
        every = zip(*self._ranks.gather(times), strict=True)
        return found | {
            "iteration_ms": [round(statistics.mean(each), 3) for each in every],
            "cpu_ms": self._ranks.mean(cpu_ms),
            "peak_bytes": max(self._ranks.gather(peak)),
            "losses": [loss.item() for loss in losses],
            "stats": figures,
        }

    def _set_up(self, system: System) -> Running:
        model = self._model()
        if system.kind != "fsdp2":
            ddp = {"gradient_as_bucket_view": True, "device_ids": [0] if self._on_gpu else None}
            return set_up(system.kind, system.options, model, **ddp)
        # Not in torch 2.5 or older.
        from torch.distributed.fsdp import fully_shard

        # Its parameters stay after the forward pass: it sends what an all-reduce does.
        mesh = init_device_mesh(self._spec.device, (self._ranks.size,))
        blocks: Sequence[Any] = self._workload.blocks(model)
        for each in (*blocks, model):
            fully_shard(each, mesh=mesh, reshard_after_forward=False)
        for block, following in pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
        return Running(model, make_optimizer(model.parameters()))

    def _trace(self, running: Running) -> dict[str, list[Any]] | None:
        """An iteration, from what the session's observers are told."""
        observers = getattr(session_of(running.optimizer), "observers", None)
        if observers is None:
            return None
        seen = Spans()
        observers.add(seen)
        for step in range(2):
            self._iterate(running.module, running.optimizer, step)
        observers.remove(seen)
        # From one backward pass to the next.
        return traced(seen, self._passes[-5:-1])

    def _iterate(self, module: nn.Module, optimizer: Any, step: int) -> Tensor:
        """One iteration of training, as a script has it; its loss."""
        optimizer.zero_grad()
        self._passes.append(("forward", time.perf_counter_ns()))
        batches = self._workload.batches
        mixes = self._workload.mixes and self._on_gpu
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=mixes):
            loss = module(*batches[step % len(batches)])
        self._passes.append(("backward", time.perf_counter_ns()))
        loss.backward()
        self._passes.append(("step", time.perf_counter_ns()))
        if self._spec.clip:
            clip_grad_norm_(module.parameters(), self._spec.clip)
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    def _model(self) -> nn.Module:
        torch.manual_seed(SEED)
        return self._workload.make()

    def _clear(self) -> None:
        """Lets go of what the last block had; the peak of memory counts from here on."""
        gc.collect()
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _mark(self) -> Any:
        """This moment: of the device, if there is one, which is behind the host."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between_ms(self, one: Any, other: Any) -> float:
        took_ms: float = one.elapsed_time(other) if self._on_gpu else 1e3 * (other - one)
        return took_ms


def _prepare(spec: Specification, place: Place) -> str:
    # Before the driver is asked for anything, and NCCL for a group.
    set_variables({**spec.variables, **nccl_variables(place.rank)})
    if spec.device == "cpu":
        return "gloo"
    if not torch.cuda.is_available():
        raise PluginError("there is no CUDA device; --device cpu tries it without")
    torch.cuda.set_device(0)
    return "nccl"


class Spans(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, int, int]] = []

    def on_span(self, track: str, name: str, start_ns: int, end_ns: int, args: Any = None) -> None:
        self.spans.append((track, name, start_ns, end_ns))


def traced(seen: Spans, passes: Sequence[tuple[str, int]]) -> dict[str, list[Any]]:
    """An iteration in ms from the start of its backward pass, the first of these.

    Chunks with when they were sent and there, gates with when the training thread came to them and
    went on, and passes with their starts; the last one is the end.
    """
    began_ns, until_ns = passes[0][1], passes[-1][1]

    def ms(at_ns: int) -> float:
        return round((at_ns - began_ns) / 1e6, 3)

    def of(name: str) -> list[list[Any]]:
        return [
            [what, ms(start), ms(end)]
            for track, what, start, end in sorted(seen.spans, key=lambda span: span[2])
            if track == name and began_ns <= start < until_ns
        ]

    starts = [[name, ms(at_ns)] for name, at_ns in passes]
    return {"passes": starts, "chunks": of("send"), "gates": of("wait")}


if __name__ == "__main__":
    run_rank(Specification, lambda spec, _: GpuBench(spec).run(), _prepare)
