"""A training cluster in virtual time: what every rank computes, issues and waits for.

All ranks issue collectives in one order: that in which they are listed, or backward's until one is
planned of what all have measured. So a rank issues one when it has its gradients, has issued the
one before it and has credit; a collective begins at the maximum over the ranks. That is a
recurrence of maxima and sums, with one entry for each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import repeat
from math import inf

from bytesched.course import Course, Say
from bytesched.link.fabric import Fabric
from bytesched.link.planned import Measured, planned_order
from bytesched.link.work import Gather, Job, Work

__all__ = ["Cluster", "Weather"]


@dataclass(frozen=True, slots=True)
class Weather:
    """What differs from one iteration to the next."""

    #: how many times as long each rank computes
    pace: tuple[float, ...]
    #: how many times as long the links take
    links: float = 1.0


class Cluster:
    """Runs iterations of ``work`` on all ranks of ``fabric``."""

    def __init__(self, work: Work, fabric: Fabric) -> None:
        self.work, self.fabric = work, fabric
        jobs = len(work.jobs)
        self._planning = _Planning(work, fabric.ranks) if work.is_planned else None
        #: in which jobs are issued in the next iteration
        self.order: Sequence[int] = range(jobs) if self._planning is None else self._planning.order
        #: by rank, when its last forward pass has ended
        self._ended_s = [0.0] * fabric.ranks
        self._links_free_s = 0.0
        self._links = 1.0

    def iterate(self, weather: Weather) -> float:
        """One more iteration; it begins where each rank's last one has ended.

        Returns when the last rank has ended its forward pass.
        """
        work, pace = self.work, weather.pace
        self._links = weather.links
        released_s = [
            [began_s + each * at_s for began_s, each in zip(self._ended_s, pace, strict=True)]
            for at_s in work.releases_s
        ]
        arrivals_s = self._send_all(released_s)
        stepped_s = released_s[0]
        updated_s = [
            [
                max(at_s, max((arrivals_s[index] for index in bundle.jobs), default=0.0))
                + bundle.update_s
                for at_s in stepped_s
            ]
            for bundle in work.bundles
        ]
        self._ended_s = self._forward(stepped_s, updated_s, pace)
        if self._planning is not None:
            self._planning.round_ends(released_s)
            self.order = self._planning.order
        return max(self._ended_s)

    def _send_all(self, released_s: Sequence[Sequence[float]]) -> list[float]:
        """When each job has arrived, whose gradients are there at these times, by layer."""
        work = self.work
        arrivals_s = [0.0] * len(work.jobs)
        issued_s = [-inf] * self.fabric.ranks
        #: when they arrive, and their bytes
        on_way: list[tuple[float, int]] = []
        on_way_bytes, open_s = 0, -inf
        for index in self.order:
            job = work.jobs[index]
            while on_way_bytes >= work.credit_bytes:
                arrived_s, nbytes = heappop(on_way)
                open_s = max(open_s, arrived_s)
                on_way_bytes -= nbytes
            issued_s = list(map(max, issued_s, released_s[job.layer], repeat(open_s)))
            arrivals_s[index] = self._collective(issued_s, job)
            heappush(on_way, (arrivals_s[index], job.nbytes))
            on_way_bytes += job.nbytes
            if self._planning is not None:
                self._planning.sent(issued_s, arrivals_s[index])
        return arrivals_s

    def _collective(self, issued_s: Iterable[float], sent: Job | Gather) -> float:
        """When a collective is across that ranks have issued then."""
        begin_s = max(max(issued_s), self._links_free_s)
        occupied_s = self.fabric.occupied_s(sent.nbytes, sent.share)
        self._links_free_s = begin_s + self._links * occupied_s
        return self._links_free_s + self.fabric.start_up_s(sent.nbytes, sent.share)

    def _forward(
        self,
        stepped_s: Sequence[float],
        updated_s: Sequence[Sequence[float]],
        pace: Sequence[float],
    ) -> list[float]:
        """When each rank has ended its forward pass."""
        work = self.work
        now_s = list(stepped_s)
        all_s = list(map(max, *updated_s, stepped_s)) if work.gathers else []
        issued_s = [-inf] * self.fabric.ranks
        gathers = list(work.gathers)
        waiting: list[tuple[int, float]] = []

        def issue(layer: int, at_s: Sequence[float]) -> None:
            nonlocal issued_s
            while gathers and gathers[0].issued_at <= layer:
                gather = gathers.pop(0)
                issued_s = list(map(max, issued_s, all_s, at_s))
                waiting.append((gather.layer, self._collective(issued_s, gather)))

        issue(-1, stepped_s)
        for layer, forward_s in enumerate(work.forward_s):
            if work.bundle_of[layer] >= 0:
                now_s = list(map(max, now_s, updated_s[work.bundle_of[layer]]))
            there_s = max((at_s for first, at_s in waiting if first <= layer), default=-inf)
            now_s = list(map(max, now_s, repeat(there_s)))
            issue(layer, now_s)
            now_s = [at_s + each * forward_s for at_s, each in zip(now_s, pace, strict=True)]
        return now_s


class _Planning:
    """The course of iterations, in which what all ranks say takes no time."""

    def __init__(self, work: Work, ranks: int) -> None:
        self._work = work
        self._nbytes = [job.nbytes for job in work.jobs]
        self._course = Course(len(work.jobs))
        self._measured = [Measured() for _ in range(ranks)]
        #: of this iteration, by rank: how long something was under way, and until when
        self._busy_s = [0.0] * ranks
        self._until_s = [-inf] * ranks
        self._heard: Sequence[int] = ()

    @property
    def order(self) -> list[int]:
        return self._course.order

    def sent(self, issued_s: Sequence[float], arrival_s: float) -> None:
        """A job was under way on each rank, from then on."""
        self._busy_s = [
            busy_s + max(0.0, arrival_s - max(since_s, until_s))
            for busy_s, since_s, until_s in zip(self._busy_s, issued_s, self._until_s, strict=True)
        ]
        self._until_s = [max(arrival_s, until_s) for until_s in self._until_s]

    def round_ends(self, released_s: Sequence[Sequence[float]]) -> None:
        """An iteration is over, in which gradients were there at these times, by layer."""
        ready_s = [released_s[job.layer] for job in self._work.jobs]
        for rank, measured in enumerate(self._measured):
            measured.round_ends(
                [round(1e9 * by_rank_s[rank]) for by_rank_s in ready_s],
                nbytes=sum(self._nbytes),
                busy_ns=round(1e9 * self._busy_s[rank]),
            )
        self._busy_s = [0.0] * len(self._busy_s)
        say = self._course.round_ends(self._heard)
        if say is Say.NUMBERS:
            numbers = (measured.numbers() for measured in self._measured)
            self._heard = [max(column) for column in zip(*numbers, strict=True)]
        elif say is Say.PLAN:
            self._heard = planned_order(
                self._nbytes,
                self._heard,
                policy=self._work.policy,
                credit_bytes=self._work.credit_bytes,
            )
