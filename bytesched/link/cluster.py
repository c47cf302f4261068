"""A training cluster in virtual time: what a rank computes, issues and waits for.

One rank stands for all of them, which are alike. It issues collectives in one order: as they become
ready, or as planned of what was measured (plugins/planned/planning.py), each when its gradients are
there and the one before it was issued. That is a recurrence of maxima and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Final

from bytesched.ahead import CONCURRENT, ChunkTimes, Link, Planner, is_measured
from bytesched.link.fabric import Fabric

#: of a prediction, in the second half of which a plan has been made twice
ITERATIONS: Final = 16


@dataclass(frozen=True, slots=True)
class Job:
    """One collective of the backward pass."""

    nbytes: int
    #: the first layer that needs it: lower goes first
    gate: int
    #: the layer whose gradient it waits for last: the first one in forward order
    layer: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """What is updated when these jobs have arrived."""

    jobs: tuple[int, ...]
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """An iteration, the same on all ranks: layers are in the order of the forward pass."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    #: as they become ready
    jobs: tuple[Job, ...]
    bundles: tuple[Bundle, ...]
    #: the bundle that each layer waits for; -1: none
    bundle_of: tuple[int, ...]
    #: how jobs are ordered: as planned of what ranks measure, or in the order they are listed
    is_planned: bool = False
    policy: str = "priority"
    #: how far ahead of the link a plan is decided
    credit_bytes: int = 1

    @property
    def releases_s(self) -> tuple[float, ...]:
        """From the start of backward until each layer's gradient is computed."""
        return tuple(accumulate(reversed(self.backward_s)))[::-1]


class Cluster:
    """Runs iterations of ``work`` on the ranks of ``fabric``."""

    def __init__(self, work: Work, fabric: Fabric) -> None:
        self.work, self.fabric = work, fabric
        as_ready = range(len(work.jobs))
        #: in which jobs are issued in the next iteration
        self.order: Sequence[int] = as_ready
        self._as_ready = as_ready
        self._iteration = 0
        #: when the last forward pass has ended
        self._ended_s = 0.0
        self._links_free_s = 0.0
        self._planner = Planner(work.policy, work.credit_bytes)

    def iterate(self) -> float:
        """When one more iteration ends, which begins where the last one did."""
        work, began_s = self.work, self._ended_s
        released_s = [began_s + after_s for after_s in work.releases_s]
        arrivals_s, busy_s = self._send_all(released_s)
        stepped_s = released_s[0]
        updated_s = [
            max(stepped_s, max((arrivals_s[index] for index in bundle.jobs), default=0.0))
            + bundle.update_s
            for bundle in work.bundles
        ]
        self._ended_s = self._forward(stepped_s, updated_s)
        if work.is_planned and work.policy != "fifo" and is_measured(self._iteration):
            ready_s = [released_s[job.layer] for job in work.jobs]
            self._plan(ready_s, busy_s, self._ended_s - began_s)
        self._iteration += 1
        return self._ended_s

    def _send_all(self, released_s: Sequence[float]) -> tuple[list[float], float]:
        """When each job has arrived, whose gradients are there at these times, by layer.

        And for how long something was under way.
        """
        arrivals_s = [0.0] * len(self.work.jobs)
        issued_s = until_s = -inf
        busy_s = 0.0
        for index in self.order:
            job = self.work.jobs[index]
            issued_s = max(issued_s, released_s[job.layer])
            begin_s = max(issued_s, self._links_free_s)
            self._links_free_s = begin_s + self.fabric.occupied_s(job.nbytes)
            arrivals_s[index] = arrival_s = self._links_free_s + self.fabric.start_up_s(job.nbytes)
            busy_s += max(0.0, arrival_s - max(issued_s, until_s))
            until_s = max(until_s, arrival_s)
        return arrivals_s, busy_s

    def _plan(self, ready_s: Sequence[float], busy_s: float, iteration_s: float) -> None:
        """The order from now on, of what was measured in an iteration."""
        jobs, first_s = self.work.jobs, min(ready_s)
        order = self._planner.measured(
            [
                ChunkTimes(job.nbytes, at_s - first_s, job.gate)
                for job, at_s in zip(jobs, ready_s, strict=True)
            ],
            Link(
                busy_s / sum(job.nbytes for job in jobs),
                0.0,
                CONCURRENT if self.fabric.overlaps else 1,
            ),
            iteration_s,
            is_planned=self.order is not self._as_ready,
        )
        self.order = self._as_ready if order is None else order

    def _forward(self, stepped_s: float, updated_s: Sequence[float]) -> float:
        """When the forward pass has ended."""
        now_s = stepped_s
        for bundle, forward_s in zip(self.work.bundle_of, self.work.forward_s, strict=True):
            if bundle >= 0:
                now_s = max(now_s, updated_s[bundle])
            now_s += forward_s
        return now_s
