"""One rank of `bytesched bench`: ``python -m bytesched.plugins.bench.worker SPEC PLACE``."""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch

from bytesched.bench.specification import Specification
from bytesched.bench.systems import HOROVOD_SYSTEMS, KVSTORE_SYSTEMS, System
from bytesched.files import write_text
from bytesched.lab.ranks import Place
from bytesched.link.bound import (
    exchanging_optimum_s,
    gradients,
    optimum_s,
    sharded_optimum_s,
    split_optimum_s,
)

from .block import SEED, core_times, reset_peak, stolen_share, train
from .link import Link
from .rank import Ranks, run_rank
from .systems.data_parallel import make_optimizer, set_up, set_up_experts
from .systems.processes import run_block
from .workloads.compute import measure_compute, measure_update, record_profile
from .workloads.models import build

COMPUTE_ITERATIONS: Final = 5
SWEPT_BUCKETS_MB: Final = (1, 2, 4, 8, 16, 25)
SWEEP_WARMUP: Final = 2


def first_round(kinds: Sequence[str]) -> list[int]:
    """The order of the systems in the first round, by their place among the `kinds`.

    bytesched begins, then what it is compared with as that is; what is swept comes last. So a
    bench that is stopped early has measured what was asked about.
    """

    def eagerness(place: int) -> int:
        kind = kinds[place]
        if kind.startswith("bytesched"):
            return 0
        return 1 if kind in ("ddp", "horovod", "kv-plain") else 2 + kind.endswith("-best")

    return sorted(range(len(kinds)), key=eagerness)


def estimate(spec: Specification, iteration_s: float) -> str:
    """How long all of it takes, in a line, of iterations whose communication nothing hides."""
    kinds = [system.kind for system in spec.systems]
    # A block ends with one more iteration, whose beginning is the end of the last one timed.
    iterations = len(kinds) * spec.rounds * (spec.warmup + spec.iterations + 1)
    block = SWEEP_WARMUP + spec.sweep_iterations + 1
    iterations += kinds.count("ddp-best") * 2 * len(SWEPT_BUCKETS_MB) * block
    return (
        f"estimate: {max(iterations * iteration_s / 60, 0.1):.1f} min, for {iterations} iterations "
        f"of at most {1e3 * iteration_s:.0f} ms; ctrl-C ends it and prints the table of "
        "what was measured until then"
    )


class Bench:
    """Runs the systems of a specification in turn, on every rank the same."""

    def __init__(self, spec: Specification, place: Place) -> None:
        self.spec = spec
        self.place = place
        self.is_on_gpu = spec.device == "cuda"
        self.systems = list(spec.systems)
        self.ranks = Ranks()
        self.link = Link(self.ranks, spec, place)
        self.compute_samples: list[dict[str, float]] = []
        #: bytes and tensors of the model, and its profiles if they are recorded
        self.model: dict[str, Any] = {}
        #: of each system, by its label
        self.results: dict[str, dict[str, Any]] = {s.label: {"rounds": []} for s in spec.systems}
        #: of DDP by bucket size in MB, where they are swept
        self.sweep: dict[str, dict[str, float]] = {}
        exchanged = [one.exchange_bytes for one in spec.profile.layers] if spec.profile else []
        #: of the smallest all-to-all, and how many of these all of an iteration would be
        self.exchange_bytes = min(filter(None, exchanged), default=0)
        self.exchanges = 4 * sum(exchanged) / max(self.exchange_bytes, 1)
        self._began = core_times()

    def run(self) -> dict[str, Any]:
        """The result that the report is made from, the same on every rank."""
        say, spec = self.ranks.say, self.spec
        self.prepare()
        self.describe()
        for turn in range(spec.rounds):
            self.probe()
            if not turn:
                each = self.compute_samples[-1]
                names = ("compute_ms", "update_ms", "exchange_ms")
                sending_s = self.model["model_bytes"] / self.link.bytes_per_s
                say(estimate(spec, sum(each.get(name, 0.0) for name in names) / 1e3 + sending_s))
            places = range(len(self.systems))
            for number in places if turn else first_round([s.kind for s in self.systems]):
                system = self.systems[number]
                if system.kind == "ddp-best":
                    system = self.systems[number] = self.with_best_bucket(system)
                block = self.block(system, spec.warmup, spec.iterations)
                self.results[system.label]["rounds"].append(block)
                median_ms = statistics.median(block["iteration_ms"])
                say(f"round {turn + 1}/{spec.rounds}  {system.label:<18} {median_ms:8.1f} ms")
                if self.ranks.rank == 0:
                    # Whoever stops the bench gets a table of what is there.
                    write_text(Path(self.place.result), json.dumps(self.found()))
        self.finish()
        found = self.found()
        return found | {"stolen_share": max(self.ranks.gather(found["stolen_share"]))}

    def found(self) -> dict[str, Any]:
        """The result so far: of the systems that were measured at least once."""
        compute = {
            name: statistics.median(sample[name] for sample in self.compute_samples)
            for name in self.compute_samples[0]
        }
        compute["communication_ms"] = 1e3 * self.model["model_bytes"] / self.link.bytes_per_s
        return {
            "world_size": self.ranks.size,
            "ranks_per_host": self.spec.ranks_per_host,
            "torch": torch.__version__,
            "stolen_share": stolen_share(self._began, core_times()),
            **self.link.facts(),
            "compute": compute | self.model,
            **self.sweep,
            "systems": {label: its for label, its in self.results.items() if its["rounds"]},
        }

    def with_best_bucket(self, system: System) -> System:
        """DDP with the bucket size that is best.

        The sizes are tried up and then down again, so that a slow minute does not choose.
        """
        found: dict[str, float] = {}
        for bucket_mb in (*SWEPT_BUCKETS_MB, *reversed(SWEPT_BUCKETS_MB)):
            options = {"bucket_mb": str(bucket_mb), "bucket_view": "1"}
            one = System("ddp", "ddp", options)
            block = self.block(one, SWEEP_WARMUP, self.spec.sweep_iterations)
            median_ms = statistics.median(block["iteration_ms"])
            found[str(bucket_mb)] = found.get(str(bucket_mb), 0.0) + median_ms / 2
            self.ranks.say(f"bucket sweep {bucket_mb:>3} MB {median_ms:19.1f} ms")
        self.sweep["bucket_sweep_ms"] = found
        best_mb = min(found, key=found.__getitem__)
        self.results[system.label]["bucket_mb"] = float(best_mb)
        options = {"bucket_mb": best_mb, "bucket_view": "1"}
        return replace(system, kind="ddp", options=options)

    def seed_of(self, step: int) -> int:
        """Seed of this rank's batch."""
        return step * self.ranks.size + self.ranks.rank

    def prepare(self) -> None:
        """What comes before the first round."""
        spec = self.spec
        if not self.link.settle() and spec.comm_ratio:
            self.ranks.say(
                "the link does not keep a rate: compute will be off what --comm-ratio asks for"
            )
        if spec.profile and spec.comm_ratio:
            sending_s = spec.profile.nbytes / self.link.bytes_per_s
            scale = sending_s / (spec.profile.compute_s * spec.comm_ratio)
            self.spec = replace(spec, profile=spec.profile.scaled(scale))

    def finish(self) -> None:
        """What comes after the last round."""

    def describe(self) -> None:
        """Size of the model and, if asked for, its compute profiles by batch size."""
        parameters = list(build(self.spec, SEED).model.parameters())
        self.model = {
            "model_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "tensors": len(parameters),
        }
        for batch in self.spec.recorded:
            workload = build(replace(self.spec, batch=batch), SEED)
            times = measure_compute(workload, 2 * COMPUTE_ITERATIONS, self.seed_of)
            profile = record_profile(self.spec.model, workload, times)
            self.model.setdefault("profiles", []).append(asdict(profile))

    def probe(self) -> None:
        """Time the link, and the model alone and beside traffic, and derive T*."""
        self.link.probe(self.exchange_bytes)
        workload = build(self.spec, SEED)
        self.ranks.barrier()
        alone = measure_compute(workload, COMPUTE_ITERATIONS, self.seed_of)
        layers = self.spec.profile.chain() if self.spec.profile else []
        if self.spec.profile:
            compute_s, work = self.spec.profile.compute_s, gradients(layers)
        else:
            traffic_bytes = sum(alone.nbytes)
            beside = measure_compute(workload, COMPUTE_ITERATIONS, self.seed_of, traffic_bytes)
            compute_s, work = beside.compute_s, beside.work()
        optimizer = make_optimizer(workload.model.parameters(), fused=self.spec.servers is None)
        rate, is_clipped = self.link.bytes_per_s, bool(self.spec.clip)
        bound_s = split_optimum_s if is_clipped else optimum_s
        found = {
            "compute_ms": compute_s,
            "compute_alone_ms": alone.compute_s,
            "update_ms": measure_update(workload.model, optimizer, COMPUTE_ITERATIONS),
            "optimum_ms": bound_s(work, compute_s, rate),
            "sharded_optimum_ms": sharded_optimum_s(work, compute_s, rate, is_clipped=is_clipped),
        }
        if self.exchanges:
            rates = rate, self.link.exchange_bytes_per_s
            # What an all-to-all takes beyond its bytes: gradients may use the link meanwhile.
            late_s = max(0.0, self.link.exchange_s - self.exchange_bytes / rates[1])
            found["optimum_ms"] = exchanging_optimum_s(layers, *rates, latency_s=late_s)
            found["pieces_optimum_ms"] = exchanging_optimum_s(layers, *rates, in_pieces=True)
            found["exchange_ms"] = self.exchanges * self.link.exchange_s
        means = self.ranks.means([1e3 * each_s for each_s in found.values()])
        self.compute_samples.append(dict(zip(found, means, strict=True)))

    def block(self, system: System, warmup: int, iterations: int) -> dict[str, Any]:
        """Train a new model with one system; what all ranks found."""
        spec = replace(self.spec, systems=(system,), warmup=warmup, iterations=iterations)
        if system.kind in KVSTORE_SYSTEMS:
            found = run_block(spec, self.place, {})
        elif system.kind in HOROVOD_SYSTEMS:
            from .systems.horovod import block_variables, split_options

            variables, options = split_options(system.options)
            spec = replace(spec, systems=(replace(system, options=options),))
            found = run_block(spec, self.place, block_variables(self.ranks, self.place) | variables)
        else:
            found = self.own_block(spec)
        gather = self.ranks.gather
        if "exchange_ms" in found:
            found["exchange_ms"] = list(chain.from_iterable(gather(found["exchange_ms"])))
            found["exchange_wait_ms"] = self.ranks.mean(found["exchange_wait_ms"])
        return found | {
            "iteration_ms": [round(ms, 3) for ms in self.ranks.means(found["iteration_ms"])],
            "cpu_ms": self.ranks.mean(found["cpu_ms"]),
            "losses": gather(found["losses"]),
            "weights": gather(found["weights"]),
        }

    def own_block(self, spec: Specification) -> dict[str, Any]:
        """A block in this process, over torch's own process group."""
        began_bytes = reset_peak(is_on_gpu=self.is_on_gpu)
        [system], workload = spec.systems, build(spec, SEED)
        if self.exchanges:
            running = set_up_experts(system.kind, system.options, workload.model)
        else:
            running = set_up(system.kind, system.options, workload.model, spec.device)
        self.ranks.barrier()
        length = spec.warmup, spec.iterations
        found = train(workload, running, *length, self.seed_of, spec.clip)
        del workload, running
        gc.collect()
        # Beyond what the process had: other systems ran in it before.
        found["peak_bytes"] -= began_bytes
        return found | {
            name: max(self.ranks.gather(found[name])) for name in ("peak_bytes", "state_bytes")
        }


if __name__ == "__main__":
    run_rank(Specification, lambda spec, place: Bench(spec, place).run())
