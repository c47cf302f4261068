"""One rank of `bytesched bench`: ``python -m bytesched.plugins.bench.worker SPECIFICATION``."""

from __future__ import annotations

import gc
import json
import statistics
import sys
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bytesched.bench.profile import Profile, parse_profile
from bytesched.bench.specification import Specification
from bytesched.bench.stolen import core_times, stolen_share
from bytesched.bench.systems import HOROVOD_SYSTEMS, KVSTORE_SYSTEMS, System
from bytesched.errors import PluginError
from bytesched.files import write_text
from bytesched.lab.ranks import Place
from bytesched.link.bound import (
    exchanging_optimum_s,
    gradients,
    optimum_s,
    sharded_optimum_s,
    split_optimum_s,
)
from bytesched.records import from_json

from .block import SEED, train
from .course import SWEEP_WARMUP, SWEPT_BUCKETS_MB, estimate, first_round
from .leaving import leave_after
from .link import Link
from .memory import reset_peak
from .systems.data_parallel import make_optimizer, set_up
from .systems.expert_parallel import set_up_experts
from .systems.processes import OwnProcesses
from .workloads.compute import Traffic, measure_compute, measure_update, record_profile
from .workloads.models import Workload, build

if TYPE_CHECKING:
    from .systems.horovod import HorovodBlocks, Settings

KVSTORE_RANK = "bytesched.plugins.bench.systems.kvstore_rank"
COMPUTE_ITERATIONS = 5


class Bench:
    """Runs the systems of a specification in turn, on every rank the same."""

    def __init__(self, spec: Specification, place: Place) -> None:
        self.spec = spec
        self.place = place
        self.systems = list(spec.systems)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.content = spec.content
        shared = spec.ranks_per_host if place.link_bytes_per_s else 1
        self.link = Link(spec.servers, place.link_bytes_per_s, shared)
        self.compute_samples: list[dict[str, float]] = []
        self.sweeps_ms: dict[str, dict[str, float]] = {}

    def run(self) -> dict[str, Any]:
        """The result that the report is made from, the same on every rank."""
        began = core_times()
        if not self.link.settle() and self.spec.comm_ratio:
            self.say(
                "the link does not keep a rate: compute will be off what --comm-ratio asks for"
            )
        if self.spec.kind == "emulate":
            self.content = self.scaled_profile().to_json()
        model = self.describe()
        systems: dict[str, dict[str, Any]] = {s.label: {"rounds": []} for s in self.systems}
        for turn in range(self.spec.rounds):
            self.link.probe()
            if self.exchanged_bytes:
                self.link.probe_exchanges(self.least_exchange_bytes)
            self.probe_compute()
            if not turn:
                self.say(self.estimate(model["model_bytes"]))
            places = range(len(self.systems))
            for number in places if turn else first_round([s.kind for s in self.systems]):
                if not turn:
                    self.systems[number], chosen = self.choose(self.systems[number])
                    systems[self.systems[number].label] |= chosen
                system = self.systems[number]
                block = self.block(system, self.spec.warmup, self.spec.iterations)
                systems[system.label]["rounds"].append(block)
                self.say(
                    f"round {turn + 1}/{self.spec.rounds}  {system.label:<18} "
                    f"{statistics.median(block['iteration_ms']):8.1f} ms"
                )
                if self.rank == 0:
                    # Whoever stops the bench gets a table of what is there.
                    so_far = self.found(model, systems, stolen_share(began, core_times()))
                    write_text(Path(self.place.result), json.dumps(so_far))
        stolen = max(self.gather(stolen_share(began, core_times())))
        return self.found(model, systems, stolen)

    def estimate(self, model_bytes: int) -> str:
        """How long all of it takes, in a line, now that link and compute were measured once."""
        each = self.compute_samples[-1]
        compute_s = (each["compute_ms"] + each["update_ms"]) / 1e3 + self.exchange_s
        return estimate(self.spec, compute_s + model_bytes / self.link.bytes_per_s)

    @cached_property
    def exchanged_bytes(self) -> int:
        """That a rank hands to all-to-alls in an iteration."""
        is_emulated = self.spec.kind == "emulate"
        return parse_profile(self.content, "of the bench").exchanged_bytes if is_emulated else 0

    @property
    def least_exchange_bytes(self) -> int:
        """Of its smallest all-to-all."""
        layers = parse_profile(self.content, "of the bench").layers
        return min(layer.exchange_bytes for layer in layers if layer.exchange_bytes)

    @property
    def exchange_s(self) -> float:
        """How long these take on idle links."""
        if not self.exchanged_bytes:
            return 0.0
        return self.exchanged_bytes / self.least_exchange_bytes * self.link.exchange_s

    def found(
        self, model: dict[str, Any], systems: dict[str, dict[str, Any]], stolen: float
    ) -> dict[str, Any]:
        """The result so far: of the systems that were measured at least once."""
        compute = {
            name: statistics.median(sample[name] for sample in self.compute_samples)
            for name in self.compute_samples[0]
        }
        compute["communication_ms"] = 1e3 * model["model_bytes"] / self.link.bytes_per_s
        if self.exchanged_bytes:
            compute["exchange_ms"] = 1e3 * self.exchange_s
        return {
            "world_size": self.world_size,
            "ranks_per_host": self.spec.ranks_per_host,
            "torch": torch.__version__,
            "stolen_share": stolen,
            **self.link.facts(),
            "compute": compute | model,
            **self.sweeps_ms,
            "systems": {label: system for label, system in systems.items() if system["rounds"]},
        }

    def choose(self, system: System) -> tuple[System, dict[str, Any]]:
        """For a system that is to be tuned, the plain one with the settings it needs.

        And what was chosen, for the report.
        """
        if system.kind == "ddp-best":
            buckets = self.sweeps_ms["bucket_sweep_ms"] = self.sweep_buckets()
            best_mb = min(buckets, key=lambda bucket: buckets[bucket])
            options = {"bucket_mb": best_mb, "bucket_view": "1"}
            return replace(system, kind="ddp", options=options), {"bucket_mb": float(best_mb)}
        if system.kind == "horovod-best":
            return self.choose_horovod(system)
        return system, {}

    def choose_horovod(self, system: System) -> tuple[System, dict[str, Any]]:
        """The same for Horovod."""
        from .systems.horovod import split_options, sweep

        given, _ = split_options(system.options)
        swept = sweep(self.horovod_ms, given)
        self.sweeps_ms["horovod_sweep_ms"] = {str(tried): ms for tried, ms in swept.items()}
        settings = min(swept, key=lambda tried: swept[tried])
        system = replace(system, kind="horovod", options=settings.options())
        return system, {"settings": str(settings)}

    def horovod_ms(self, settings: Settings) -> float:
        """Milliseconds of plain Horovod with these settings, as every rank knows them."""
        median_ms = self.median_ms(System("horovod", "horovod", settings.options()))
        self.say(f"horovod sweep {settings!s:>14} {median_ms:14.1f} ms")
        return median_ms

    def workload(self) -> Workload:
        """The model as it is at the start of every block."""
        return build(self.spec.kind, self.content, self.spec.batch, SEED)

    @cached_property
    def horovod(self) -> HorovodBlocks:
        """What runs Horovod; made when the first system needs it."""
        from .systems.horovod import HorovodBlocks

        return HorovodBlocks(self.spec, self.place, self.content)

    @cached_property
    def kvstore(self) -> OwnProcesses:
        """What runs workers and servers, which are ranks of one job of MPI."""
        return OwnProcesses(KVSTORE_RANK, self.spec, self.place, self.content, by_mpi=True)

    def close(self) -> None:
        """Let go of what was started."""
        if "horovod" in vars(self):
            self.horovod.close()

    def seed_of(self, step: int) -> int:
        """Seed of this rank's batch."""
        return step * self.world_size + self.rank

    def scaled_profile(self) -> Profile:
        """The profile to emulate, with the compute time that the specification asks for."""
        profile = parse_profile(self.content, "of the bench")
        scale = self.spec.compute_scale
        if self.spec.comm_ratio:
            comm_s = profile.nbytes / self.link.bytes_per_s
            scale = comm_s / (profile.compute_s * self.spec.comm_ratio)
        return profile.scaled(scale)

    def describe(self) -> dict[str, Any]:
        """Size of the model and, if asked for, its compute profiles by batch size."""
        workload = self.workload()
        parameters = list(workload.model.parameters())
        found: dict[str, Any] = {
            "model_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "tensors": len(parameters),
        }
        if self.spec.record:
            found["profiles"] = [self.profile(batch).to_json() for batch in self.spec.record]
        return found

    def profile(self, batch: int) -> Profile:
        """What the model computes at a batch size, 0 being its own."""
        workload = build(self.spec.kind, self.content, batch, SEED)
        times = measure_compute(workload, 2 * COMPUTE_ITERATIONS, self.seed_of, None)
        name = self.content if isinstance(self.content, str) else "an emulated model"
        return record_profile(name, workload, times)

    def probe_compute(self) -> None:
        """Time the model alone and beside traffic, and derive T*."""
        workload = self.workload()
        model = workload.model
        dist.barrier()
        alone = measure_compute(workload, COMPUTE_ITERATIONS, self.seed_of, None)
        if self.spec.kind == "emulate":
            profile = parse_profile(self.content, "of the bench")
            compute_s, work = profile.compute_s, gradients(profile.chain())
        else:
            traffic = Traffic(sum(alone.nbytes))
            beside = measure_compute(workload, COMPUTE_ITERATIONS, self.seed_of, traffic)
            traffic.close()
            compute_s, work = beside.compute_s, beside.work()
        update_s = measure_update(
            model, make_optimizer(self.spec.optimizer, model.parameters()), COMPUTE_ITERATIONS
        )
        bound_s = split_optimum_s if self.spec.clip else optimum_s
        best_s = bound_s(work, compute_s, self.link.bytes_per_s)
        sharded_s = sharded_optimum_s(
            work, compute_s, self.link.bytes_per_s, is_clipped=bool(self.spec.clip)
        )
        found = {
            "compute_ms": compute_s,
            "compute_alone_ms": alone.compute_s,
            "update_ms": update_s,
            "optimum_ms": best_s,
            "sharded_optimum_ms": sharded_s,
        }
        if self.exchanged_bytes:
            rates = self.link.bytes_per_s, self.link.exchange_bytes_per_s
            # What an all-to-all takes beyond its bytes: gradients may use the link meanwhile.
            sent_s = self.least_exchange_bytes / self.link.exchange_bytes_per_s
            late_s = max(0.0, self.link.exchange_s - sent_s)
            found["optimum_ms"] = exchanging_optimum_s(profile.chain(), *rates, latency_s=late_s)
            found["pieces_optimum_ms"] = exchanging_optimum_s(
                profile.chain(), *rates, in_pieces=True
            )
        self.compute_samples.append({name: self.mean(1e3 * s) for name, s in found.items()})

    def sweep_buckets(self) -> dict[str, float]:
        """Milliseconds of DDP for each bucket size, as every rank knows them.

        The sizes are tried up and then down again, so that a slow minute does not choose.
        """
        found: dict[str, float] = {}
        for bucket_mb in (*SWEPT_BUCKETS_MB, *reversed(SWEPT_BUCKETS_MB)):
            options = {"bucket_mb": str(bucket_mb), "bucket_view": "1"}
            median_ms = self.median_ms(System("ddp", "ddp", options))
            found[str(bucket_mb)] = found.get(str(bucket_mb), 0.0) + median_ms / 2
            self.say(f"bucket sweep {bucket_mb:>3} MB {median_ms:19.1f} ms")
        return found

    def median_ms(self, system: System) -> float:
        """Milliseconds of a system in a short block, as every rank knows them."""
        block = self.block(system, SWEEP_WARMUP, self.spec.sweep_iterations)
        return self.mean(statistics.median(block["iteration_ms"]))

    def block(self, system: System, warmup: int, iterations: int) -> dict[str, Any]:
        """Train a new model with one system; what all ranks found, and this one's times."""
        if system.kind in HOROVOD_SYSTEMS:
            found = self.horovod.block(system, warmup, iterations)
        elif system.kind in KVSTORE_SYSTEMS:
            found = self.kvstore.block(system, warmup, iterations)
        else:
            found = self.own_block(system, warmup, iterations)
        if system.kind in HOROVOD_SYSTEMS or system.kind in KVSTORE_SYSTEMS:
            # Of a process that has done nothing else.
            found = {k: v for k, v in found.items() if k not in ("peak_bytes", "state_bytes")}
        if "exchange_ms" in found:
            found["exchange_ms"] = list(chain.from_iterable(self.gather(found["exchange_ms"])))
            found["exchange_wait_ms"] = self.mean(found["exchange_wait_ms"])
        return found | {
            "cpu_ms": self.mean(found["cpu_ms"]),
            "losses": self.gather(found["losses"]),
            "weights": self.gather(found["weights"]),
        }

    def own_block(self, system: System, warmup: int, iterations: int) -> dict[str, Any]:
        """A block in this process, over torch's own process group."""
        began_bytes = reset_peak()
        workload = self.workload()
        build_up = set_up_experts if self.exchanged_bytes else set_up
        running = build_up(system.kind, system.options, workload.model, self.spec.optimizer)
        dist.barrier()
        found = train(
            workload,
            running,
            warmup=warmup,
            iterations=iterations,
            seed_of=self.seed_of,
            clip=self.spec.clip,
        )
        del workload, running
        gc.collect()
        # Beyond what the process had: other systems ran in it before.
        found["peak_bytes"] -= began_bytes
        return found | {
            name: max(self.gather(found[name])) for name in ("peak_bytes", "state_bytes")
        }

    def mean(self, value: float) -> float:
        """The mean over all ranks, the same number on each."""
        both = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(both)
        return float(both) / self.world_size

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def say(self, line: str) -> None:
        """Progress, from rank 0."""
        if self.rank == 0:
            print(line, flush=True)


def main(argv: list[str]) -> int:
    """Run one rank; rank 0 writes the result into the file that its place names."""
    spec, place = from_json(Specification, argv[0]), from_json(Place, argv[1])
    if spec.threads:
        torch.set_num_threads(spec.threads)
    dist.init_process_group("gloo", timeout=timedelta(seconds=spec.timeout_s))
    bench = Bench(spec, place)
    try:
        result = bench.run()
    except PluginError as error:
        # What failed in another process has printed where.
        print(error, file=sys.stderr, flush=True)
        return 1
    finally:
        bench.close()
    if place.rank == 0:
        Path(place.result).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave_after(main)
