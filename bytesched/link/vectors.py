"""A training cluster in virtual time, for many ranks: what all ranks do is one vector.

Only rank 0 decides, by the real `SchedulerCore`, event by event. What the others do follows: a rank
issues a job when it knows that the job is next, has issued the one before it and has the gradients;
a collective begins at the maximum over the ranks. That is a recurrence of maxima and sums, and
gives the same times, bit for bit, as `bytesched.link.cluster` does with a core on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bytesched.core import SchedulerCore
from bytesched.course import LED_ROUNDS
from bytesched.link.cluster import Iteration
from bytesched.link.control import Control, Planning, Weather
from bytesched.link.fabric import Fabric
from bytesched.link.simulation import ManualClock
from bytesched.link.work import Work
from bytesched.order import Following, Leading
from bytesched.policy import named_policy
from bytesched.task import CommTask
from bytesched.tree import WORD_TASKS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Times = NDArray[np.float64]
    Nanoseconds = NDArray[np.int64]

__all__ = ["VectorCluster"]


class VectorCluster:
    """The same as `Cluster`, with the times of all ranks in vectors."""

    def __init__(self, work: Work, fabric: Fabric, control: Control) -> None:
        import numpy as np

        self.work, self.fabric, self.control = work, fabric, control
        self._np = np
        self._releases_s = np.array(work.releases_s)
        self._released_by = work.released_by()
        self._planning = Planning(work, replay=control.replay, repeat=control.repeat)
        self._measured = _Measured(work, fabric.ranks)
        self._words = _Words(control, fabric.ranks)
        self._ended_s: Times = np.zeros(fabric.ranks)
        self._links_free_s = 0.0
        # - of one iteration
        self._links = 1.0
        self._order: list[int] = []
        self._arrivals_s: list[float] = []
        self._issued_s: Times = self._ended_s
        self._ready_s: list[Times] = []

    def iterate(self, weather: Weather) -> Iteration:
        """One more iteration; it begins where each rank's last one has ended."""
        np, work = self._np, self.work
        pace = np.array(weather.pace)
        self._links = weather.links
        released_s = self._ended_s[:, None] + pace[:, None] * self._releases_s
        self._ready_s = [released_s[:, job.layer] for job in work.jobs]
        self._arrivals_s = [0.0] * len(work.jobs)
        self._issued_s = np.full(self.fabric.ranks, -np.inf)
        self._order, self._words.count = [], 0
        replayed = self._planning.replayed
        self._send_all([float(at_s) for at_s in released_s[0]])
        updated_s = [self._updated_s(index, released_s[:, 0]) for index in range(len(work.bundles))]
        self._ended_s = self._forward(released_s[:, 0], updated_s, pace)
        if self._planning.replay:
            self._measured.round_ends(self._ready_s)
        self._planning.round_ends(self._order, self.largest)
        return Iteration(
            float(self._ended_s.max()), tuple(self._order), self._words.count, replayed is not None
        )

    def largest(self) -> list[int]:
        """The largest numbers of all ranks (see planned.Measured), after iterations enough."""
        return self._measured.largest()

    def _send_all(self, released_s: Sequence[float]) -> None:
        """All jobs, as rank 0 starts them, whose gradients are computed at these times."""
        work, clock = self.work, ManualClock()
        replayed = self._planning.replayed
        leads = work.led and replayed is None
        tasks = work.tasks()
        core = SchedulerCore(
            Leading(named_policy(work.policy)) if leads else Following(),
            credit_bytes=work.credit_bytes if work.led else 1 << 62,
        )

        def ready(indices: Sequence[int]) -> None:
            for index in indices:
                tasks[index].notify_ready()
                start(core.ready(tasks[index]))

        def arrived(index: int) -> None:
            start(core.finish(tasks[index]))

        def start(started: Sequence[CommTask]) -> None:
            indices = [task.index for task in started]
            self._order += indices
            for first in range(0, len(indices), WORD_TASKS):
                known_s = self._words.arrive(clock.now_s) if leads else None
                for index in indices[first : first + WORD_TASKS]:
                    self._issue(index, clock.now_s, known_s)
                    clock.call_at(self._arrivals_s[index], partial(arrived, index))

        if not leads:
            core.ordered(range(len(tasks)) if replayed is None else replayed)
        for layer in reversed(range(len(released_s))):
            clock.call_at(released_s[layer], partial(ready, self._released_by[layer]))
        clock.run()

    def _issue(self, index: int, now_s: float, known_s: Times | None) -> None:
        """Rank 0 starts a job now, and the others know it then, or have known it before."""
        np = self._np
        issued_s = np.maximum(self._issued_s, self._ready_s[index])
        if known_s is not None:
            issued_s = np.maximum(issued_s, known_s)
        issued_s[0] = now_s
        self._issued_s = issued_s
        job = self.work.jobs[index]
        self._arrivals_s[index] = self._collective(float(issued_s.max()), job.nbytes, job.share)
        if self._planning.replay:
            self._measured.sent(issued_s, self._arrivals_s[index])

    def _collective(self, issued_s: float, nbytes: int, share: float) -> float:
        """When a collective is across that the last rank has issued at ``issued_s``."""
        begin_s = max(issued_s, self._links_free_s)
        occupied_s = self.fabric.occupied_s(nbytes, share)
        self._links_free_s = begin_s + self._links * occupied_s
        return self._links_free_s + self.fabric.start_up_s(nbytes, share)

    def _updated_s(self, number: int, stepped_s: Times) -> Times:
        bundle = self.work.bundles[number]
        last_s = max((self._arrivals_s[index] for index in bundle.jobs), default=0.0)
        updated_s: Times = self._np.maximum(stepped_s, last_s) + bundle.update_s
        return updated_s

    def _forward(self, stepped_s: Times, updated_s: Sequence[Times], pace: Times) -> Times:
        """When each rank has ended its forward pass."""
        np, work = self._np, self.work
        now_s = stepped_s
        if work.gathers:
            all_s = np.maximum.reduce(updated_s)
            issued_s = np.full(self.fabric.ranks, -np.inf)
        gathers = list(work.gathers)
        waiting: list[tuple[int, float]] = []

        def issue(layer: int, at_s: Times) -> None:
            nonlocal issued_s
            while gathers and gathers[0].issued_at <= layer:
                gather = gathers.pop(0)
                issued_s = np.maximum(np.maximum(issued_s, all_s), at_s)
                arrival_s = self._collective(float(issued_s.max()), gather.nbytes, gather.share)
                waiting.append((gather.layer, arrival_s))

        issue(-1, stepped_s)
        for layer, forward_s in enumerate(work.forward_s):
            if work.bundle_of[layer] >= 0:
                now_s = np.maximum(now_s, updated_s[work.bundle_of[layer]])
            for first, arrival_s in waiting:
                if first <= layer:
                    now_s = np.maximum(now_s, arrival_s)
            issue(layer, now_s)
            now_s = now_s + pace * forward_s
        return now_s


class _Measured:
    """The largest numbers of all ranks, the same as those of `planned.Measured` on each."""

    def __init__(self, work: Work, ranks: int) -> None:
        import numpy as np

        self._np: Any = np
        self._nbytes = sum(job.nbytes for job in work.jobs)
        self._ready_ns: deque[Nanoseconds] = deque(maxlen=LED_ROUNDS)
        self._bytes_per_s: deque[int] = deque(maxlen=LED_ROUNDS)
        #: of this iteration, by rank: how long something was under way, and until when
        self._busy_ns: Nanoseconds = np.zeros(ranks, dtype=np.int64)
        self._until_ns: Nanoseconds = np.zeros(ranks, dtype=np.int64)

    def sent(self, issued_s: Times, arrival_s: float) -> None:
        """A job was under way on each rank, from then on."""
        np = self._np
        until_ns = round(1e9 * arrival_s)
        since_ns = np.maximum(np.rint(1e9 * issued_s).astype(np.int64), self._until_ns)
        self._busy_ns += np.maximum(until_ns - since_ns, 0)
        self._until_ns = np.maximum(self._until_ns, until_ns)

    def round_ends(self, ready_s: Sequence[Times]) -> None:
        """An iteration is over, in which each job became ready then on each rank."""
        np = self._np
        ready_ns = np.rint(1e9 * np.stack(ready_s)).astype(np.int64)
        self._ready_ns.append(ready_ns - ready_ns.min(axis=0))
        self._bytes_per_s.append(self._nbytes * 10**9 // max(int(self._busy_ns.min()), 1))
        self._busy_ns[:] = 0

    def largest(self) -> list[int]:
        medians = self._np.sort(self._np.stack(self._ready_ns), axis=0)[LED_ROUNDS // 2]
        return [*self._bytes_per_s, *medians.max(axis=1).tolist()]


class _Words:
    """When each rank knows what rank 0 says."""

    def __init__(self, control: Control, ranks: int) -> None:
        import numpy as np

        self._np: Any = np
        self._control = control
        self._ranks = ranks
        #: when each rank may send the next one
        self._free_s: Times = np.zeros(ranks)
        self.count = 0

    def arrive(self, now_s: float) -> Times:
        """When each rank gets the word that rank 0 sends now."""
        np, control = self._np, self._control
        self.count += 1
        known_s: Times = np.full(self._ranks, float(now_s))
        if not control.fanout:
            return known_s
        level = np.arange(1)
        while len(level) and control.fanout * level[0] + 1 < self._ranks:
            sends_s = np.full((len(level), control.fanout + 1), float(control.send_s))
            sends_s[:, 0] = np.maximum(known_s[level], self._free_s[level])
            sent_s = np.cumsum(sends_s, axis=1)
            first = control.fanout * level[0] + 1
            level_ends = min(first + control.fanout * len(level), self._ranks)
            flat = sent_s[:, 1:].reshape(-1)[: level_ends - first]
            known_s[first:level_ends] = flat + control.latency_s
            counts = np.clip(level_ends - (control.fanout * level + 1), 0, control.fanout)
            self._free_s[level] = np.where(
                counts > 0, sent_s[np.arange(len(level)), counts], self._free_s[level]
            )
            level = np.arange(first, level_ends)
        return known_s
