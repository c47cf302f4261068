"""One rank of a job of `bytesched bench --share`, one of each on every host.

``python -m bytesched.plugins.bench.share_worker SPECIFICATION PLACE``
"""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bytesched.bench.sharing import CROSSOVER, DDP, SIDE_BY_SIDE, common_rates
from bytesched.bench.specification import Specification
from bytesched.environment import set_variables
from bytesched.lab.ranks import Place
from bytesched.link.bound import gradients, optimum_s, split_optimum_s

from .block import SEED, train
from .link import PROBE_BYTES, all_reduces_s
from .rank import Ranks, run_rank
from .systems.data_parallel import Running, make_optimizer, scheduled
from .workloads.emulated import SharedPace
from .workloads.models import emulated

_PROBES: Final = 5


class SharingBench:
    """Runs all jobs in each of the ways, on every rank the same."""

    def __init__(self, spec: Specification, place: Place) -> None:
        self._spec = spec
        jobs = len(spec.profiles)
        self._ranks = Ranks()
        self._host, self._job = divmod(self._ranks.rank, jobs)
        # Ranks of one job are on one host each; what LOCAL_RANK says is the number of the job.
        set_variables({"LOCAL_RANK": str(self._host)})
        hosts = self._ranks.size // jobs
        groups = [dist.new_group([h * jobs + j for h in range(hosts)]) for j in range(jobs)]
        group = groups[self._job]
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        folder = Path(place.result).parent
        self._turns = str(folder / "turns")
        self._pace = SharedPace(folder / f"device{self._host}", self._job)
        self._bytes_per_s = self._measured_rate()
        how = self._bytes_per_s, spec.comm_ratio, spec.compute_scale
        self._profiles = [one.paced(*how) for one in spec.profiles]

    def run(self) -> dict[str, Any]:
        """The result, on rank 0."""
        alone: list[list[float]] = []
        arms: dict[str, dict[str, Any]] = {
            arm: {"rates": [], "same_bits": True} for arm in (DDP, SIDE_BY_SIDE, CROSSOVER)
        }
        for turn in range(self._spec.rounds):
            found = [self._block("alone", [job]) for job in range(len(self._profiles))]
            expected = [one[job]["bits"] for job, one in enumerate(found)]
            alone.append([_rates(one)[job] for job, one in enumerate(found)])
            self._say(turn, "alone", alone[-1])
            for arm, its in arms.items():
                together = self._block(arm, range(len(self._profiles)))
                its["rates"].append(_rates(together))
                its["same_bits"] &= [together[job]["bits"] for job in sorted(together)] == expected
                its["figures"] = [together[job]["figures"] for job in sorted(together)]
                self._say(turn, arm, its["rates"][-1])
        return {"jobs": self._described(alone), "arms": arms, "alone": alone}

    def _described(self, alone: list[list[float]]) -> list[dict[str, Any]]:
        bound_s = split_optimum_s if self._spec.clip else optimum_s
        rate = self._bytes_per_s
        return [
            {
                "name": one.name,
                "compute_ms": 1e3 * one.compute_s,
                "alone_ms": 1e3 / statistics.median(rates),
                "link_ms": 1e3 * one.nbytes / rate,
                "optimum_ms": 1e3 * bound_s(gradients(one.chain()), one.compute_s, rate),
            }
            for one, rates in zip(self._profiles, zip(*alone, strict=True), strict=True)
        ]

    def _block(self, arm: str, jobs: Any) -> dict[int, dict[str, Any]]:
        """Trains these jobs from their beginning; what each of them found."""
        found: dict[str, Any] | None = None
        if self._job in jobs:
            workload = emulated(self._profiles[self._job], SEED, self._pace)
            running = self._set_up(arm, workload.model)
        dist.barrier()
        if self._job in jobs:
            starts_s: list[float] = []

            def seed_of(step: int) -> int:
                """Of this rank's batch; those after the warm-up begin together."""
                if step == warmup and len(jobs) > 1:
                    dist.barrier()
                if step >= warmup:
                    starts_s.append(time.monotonic())
                return step * self._group.size() + self._group.rank()

            warmup, length = self._spec.warmup, self._spec.iterations
            trained = train(workload, running, warmup, length, seed_of, self._spec.clip)
            if self._host == 0:
                found = {
                    "job": self._job,
                    "starts_s": starts_s,
                    "bits": [trained["losses"], trained["weights"]],
                    "figures": trained["stats"],
                }
            del workload, running
            gc.collect()
        return {one["job"]: one for one in self._ranks.gather(found) if one is not None}

    def _set_up(self, arm: str, model: nn.Module) -> Running:
        wrapped = DistributedDataParallel(model, process_group=self._group)
        optimizer = make_optimizer(self._spec.optimizer, model.parameters())
        if arm == DDP:
            return Running(wrapped, optimizer)
        share = {"share": self._turns} if arm == CROSSOVER else {}
        [options] = [system.options for system in self._spec.systems]
        return scheduled(optimizer, wrapped, options | share)

    def _measured_rate(self) -> float:
        """Bytes per second of the first job's large all-reduces, as every rank knows it."""
        rate = 0.0
        if self._job == 0:
            rate = PROBE_BYTES / statistics.median(all_reduces_s(PROBE_BYTES, _PROBES, self._group))
        found: float = self._ranks.gather(rate)[0]
        return found

    def _say(self, turn: int, arm: str, rates: list[float]) -> None:
        each = " / ".join(f"{1e3 / rate:.1f}" for rate in rates)
        self._ranks.say(f"round {turn + 1}/{self._spec.rounds}  {arm:<20} {each} ms")


def _rates(found: dict[int, dict[str, Any]]) -> list[float]:
    """Iterations per second of each job, while all of them train; 0 of one that does not."""
    rates = common_rates({job: one["starts_s"] for job, one in found.items()})
    return [rates.get(job, 0.0) for job in range(1 + max(found))]


if __name__ == "__main__":
    run_rank(Specification, lambda spec, place: SharingBench(spec, place).run())
