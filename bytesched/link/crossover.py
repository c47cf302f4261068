"""Jobs that take turns on a device and share a link: how fast each of them is.

The model of CrossoverScheduler (arXiv 2103.07974): the device computes for one job at a time, and
what an iteration of a job waits for its own communication hides behind the others' compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["SharingJob", "bound_share", "turn_rates", "work"]

#: of a job's iterations in the simulation: those of the beginning do not count
_SETTLED: Final = 50
_COUNTED: Final = 100


@dataclass(frozen=True, slots=True)
class SharingJob:
    """One job, alone on its devices and links."""

    #: forward and backward pass
    compute_s: float
    #: an iteration; what is beyond its compute waits for communication
    iteration_s: float
    #: that its gradients take on the link
    link_s: float
    #: the least that an iteration can take
    optimum_s: float

    @property
    def exposed_s(self) -> float:
        """Time of an iteration in which the device waits for communication."""
        return max(0.0, self.iteration_s - self.compute_s)


def turn_rates(jobs: Sequence[SharingJob]) -> list[float]:
    """Iterations per second of each job, where who asks first computes next.

    Two jobs of one pace take cA + cB + max(0, mA - cB) + max(0, mB - cA) for an iteration each, c
    being the compute and m the exposed communication: min(mA, cB) + min(mB, cA) less than one
    after the other.
    """
    began_s: list[list[float]] = [[] for _ in jobs]
    #: when each job asks for the device, and when that is free
    asks_s, free_s = [0.0] * len(jobs), 0.0
    while min(map(len, began_s)) <= _SETTLED + _COUNTED:
        next_one = min(range(len(jobs)), key=lambda job: asks_s[job])
        began_s[next_one].append(max(free_s, asks_s[next_one]))
        free_s = began_s[next_one][-1] + jobs[next_one].compute_s
        asks_s[next_one] = free_s + jobs[next_one].exposed_s
    found = []
    since_s = max(of_job[_SETTLED] for of_job in began_s)
    for of_job in began_s:
        counted = [at_s for at_s in of_job if at_s >= since_s]
        found.append((len(counted) - 1) / (counted[-1] - counted[0]))
    # A link that is never idle carries no more: what jobs wait for at the same time, and what a job
    # hides behind its own compute.
    busy = max(1.0, bound_share(jobs, found))
    return [rate / busy for rate in found]


def work(jobs: Sequence[SharingJob], rates: Sequence[float]) -> float:
    """How many times as much is done at these rates as by the jobs one after the other."""
    return sum(rate * job.iteration_s for job, rate in zip(jobs, rates, strict=True))


def bound_share(jobs: Sequence[SharingJob], rates: Sequence[float]) -> float:
    """How near these rates are to what can be: 1 if no job could be faster at their ratio.

    The device cannot be more than busy, nor the link, and no iteration is shorter than its bound.
    """
    pairs = list(zip(jobs, rates, strict=True))
    return max(
        sum(rate * job.compute_s for job, rate in pairs),
        sum(rate * job.link_s for job, rate in pairs),
        *(rate * job.optimum_s for job, rate in pairs),
    )
