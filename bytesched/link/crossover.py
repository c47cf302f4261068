"""Jobs that take turns on a device and share a link: how fast each of them is.

The model of CrossoverScheduler (arXiv 2103.07974): the device computes for one job at a time, and
what an iteration of a job waits for its own communication hides behind the others' compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from bytesched.link.shared import ManualClock, SharedLink

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


class _Turns:
    """Who asks first computes next; who has computed waits for what it has exposed."""

    def __init__(self, jobs: Sequence[SharingJob]) -> None:
        self._jobs = jobs
        self.clock = ManualClock()
        self._link = SharedLink(self.clock)
        self._waiting = list(range(len(jobs)))
        self._is_free = True
        #: when each job began to compute
        self.began_s: list[list[float]] = [[] for _ in jobs]

    def next_turn(self) -> None:
        """The device is free, or a job asks for it."""
        if self._is_free and self._waiting:
            self._is_free = False
            job = self._waiting.pop(0)
            self.began_s[job].append(self.clock.now_s)
            end_s = self.clock.now_s + self._jobs[job].compute_s
            self.clock.call_at(end_s, partial(self._computed, job))

    def _computed(self, job: int) -> None:
        self._is_free = True
        if (exposed_s := self._jobs[job].exposed_s) > 0:
            self._link.start(exposed_s, partial(self._sent, job))
        else:
            self._waiting.append(job)
        self.next_turn()

    def _sent(self, job: int) -> None:
        self._waiting.append(job)
        self.next_turn()


def turn_rates(jobs: Sequence[SharingJob]) -> list[float]:
    """Iterations per second of each job, where all of them take turns.

    Two jobs of one pace take cA + cB + max(0, mA - cB) + max(0, mB - cA) for an iteration each, c
    being the compute and m the exposed communication: min(mA, cB) + min(mB, cA) less than one
    after the other.
    """
    turns = _Turns(jobs)
    turns.next_turn()
    while min(map(len, turns.began_s)) <= _SETTLED + _COUNTED:
        turns.clock.advance(max(job.iteration_s for job in jobs))
    found = []
    since_s = max(began_s[_SETTLED] for began_s in turns.began_s)
    for began_s in turns.began_s:
        counted = [at_s for at_s in began_s if at_s >= since_s]
        found.append((len(counted) - 1) / (counted[-1] - counted[0]))
    # A link that is never idle carries no more: what a job hides behind its own compute, too.
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
