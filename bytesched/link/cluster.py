"""A training cluster in virtual time, event by event: real scheduler cores, modelled links.

Every rank has a `SchedulerCore` of its own; rank 0's chooses, the others follow what it says, or
all replay what rank 0 has planned of what all have measured, which takes no time here. It is meant
for few ranks, and to check `bytesched.link.vectors`, which is the same for many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from bytesched.core import SchedulerCore
from bytesched.link.control import Control, Planning, Weather
from bytesched.link.fabric import Fabric
from bytesched.link.planned import Measured
from bytesched.link.simulation import ManualClock
from bytesched.link.work import Work
from bytesched.order import Following, Leading
from bytesched.policy import named_policy
from bytesched.task import CommTask
from bytesched.tree import WORD_TASKS

__all__ = ["Cluster", "Iteration"]

#: Followers start what the leader's credit let through.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of all ranks."""

    #: when the last rank has ended its forward pass
    ended_s: float
    #: the order in which jobs were started
    order: tuple[int, ...]
    #: words that rank 0 has sent, each to all
    words: int
    #: whether all ranks kept to an order that they knew
    replayed: bool


@dataclass(slots=True)
class _Collective:
    """A job or gather, on its way from the first rank that issues it to its arrival."""

    issued: int = 0
    arrived: bool = False


class Cluster:
    """Runs iterations of ``work`` on all ranks of ``fabric``."""

    def __init__(self, work: Work, fabric: Fabric, control: Control) -> None:
        self.work, self.fabric, self.control = work, fabric, control
        self.clock = ManualClock()
        self.ranks = [_Rank(self, number) for number in range(fabric.ranks)]
        self.weather = Weather((1.0,) * fabric.ranks)
        self.planning = Planning(work, replay=control.replay, repeat=control.repeat)
        self.order: list[int] = []
        self.words = 0
        self._links_free_s = 0.0
        self._sends = [_Collective() for _ in (*work.jobs, *work.gathers)]

    def iterate(self, weather: Weather) -> Iteration:
        """One more iteration; it begins where each rank's last one has ended."""
        self.weather = weather
        # Nothing of one iteration is under way in the next one, which ranks begin by themselves.
        self.clock = ManualClock()
        self._sends = [_Collective() for _ in self._sends]
        self.order, self.words = [], 0
        replayed = self.planning.replayed
        for rank in self.ranks:
            rank.begin()
        self.clock.run()
        for rank in self.ranks:
            rank.measure()
        self.planning.round_ends(self.order, self.largest)
        ended_s = max(rank.ended_s for rank in self.ranks)
        return Iteration(ended_s, tuple(self.order), self.words, replayed is not None)

    def largest(self) -> list[int]:
        """The largest numbers of all ranks (see planned.Measured), after iterations enough."""
        numbers = [rank.measured.numbers() for rank in self.ranks]
        return [max(column) for column in zip(*numbers, strict=True)]

    def issue(self, index: int) -> None:
        """One rank issues a collective: a job, or beyond all jobs a gather."""
        send = self._sends[index]
        send.issued += 1
        if send.issued < self.fabric.ranks:
            return
        jobs, gathers = self.work.jobs, self.work.gathers
        one = jobs[index] if index < len(jobs) else gathers[index - len(jobs)]
        begin_s = max(self.clock.now_s, self._links_free_s)
        occupied_s = self.fabric.occupied_s(one.nbytes, one.share)
        self._links_free_s = begin_s + self.weather.links * occupied_s
        arrival_s = self._links_free_s + self.fabric.start_up_s(one.nbytes, one.share)
        self.clock.call_at(arrival_s, partial(self._arrived, index))

    def has_arrived(self, index: int) -> bool:
        """Whether a collective is over."""
        return self._sends[index].arrived

    def send_word(self, sender: _Rank, indices: Sequence[int]) -> None:
        """Sends on, one rank after the other, what ``sender`` knows."""
        for receiver in self.control.children(sender.number, self.fabric.ranks):
            sender.sending_s = max(self.clock.now_s, sender.sending_s) + self.control.send_s
            self.clock.call_at(
                sender.sending_s + self.control.latency_s,
                partial(self.ranks[receiver].word, indices),
            )

    def _arrived(self, index: int) -> None:
        self._sends[index].arrived = True
        for rank in self.ranks:
            rank.arrived(index)


@dataclass(slots=True)
class _Rank:
    cluster: Cluster
    number: int
    #: when its last forward pass ended, and when it may send the next word
    ended_s: float = 0.0
    sending_s: float = 0.0
    measured: Measured = field(default_factory=Measured)
    _tasks: list[CommTask] = field(init=False)
    _core: SchedulerCore = field(init=False)
    #: of this iteration, in nanoseconds: when jobs became ready, how long one was under way at
    #: least, and since when
    _ready_ns: list[int] = field(init=False)
    _busy_ns: int = 0
    _busy_since_ns: int = 0
    _under_way: int = 0
    #: of bundles: jobs that have not arrived
    _missing: list[int] = field(init=False)
    _updated: list[bool] = field(init=False)
    _is_stepped: bool = False
    #: the layer that is next in the forward pass, and whether the one before it is over
    _layer: int = 0
    _is_idle: bool = False
    #: the gather that is next
    _gather: int = 0

    @property
    def _leads(self) -> bool:
        return not self.number and self.cluster.work.led

    def begin(self) -> None:
        """The backward pass begins."""
        cluster, work = self.cluster, self.cluster.work
        self._tasks = work.tasks()
        self._ready_ns, self._busy_ns = [0] * len(work.jobs), 0
        replayed = cluster.planning.replayed
        leads = self._leads and replayed is None
        self._core = SchedulerCore(
            Leading(named_policy(work.policy)) if leads else Following(),
            credit_bytes=work.credit_bytes if self._leads else _NO_LIMIT,
        )
        if not work.led:
            self._start(self._core.ordered(range(len(work.jobs))))
        elif replayed is not None:
            self._start(self._core.ordered(replayed))
        self._missing = [len(bundle.jobs) for bundle in work.bundles]
        self._updated = [False] * len(work.bundles)
        self._is_stepped = self._is_idle = False
        self._layer = self._gather = 0
        for layer, release_s in reversed(list(enumerate(work.releases_s))):
            at_s = self.ended_s + self._pace * release_s
            cluster.clock.call_at(at_s, partial(self._released, layer))

    def measure(self) -> None:
        """The iteration is over."""
        nbytes = sum(job.nbytes for job in self.cluster.work.jobs)
        self.measured.round_ends(self._ready_ns, nbytes=nbytes, busy_ns=self._busy_ns)

    @property
    def _pace(self) -> float:
        return self.cluster.weather.pace[self.number]

    def word(self, indices: Sequence[int]) -> None:
        """The leader's word has come."""
        self.cluster.send_word(self, indices)
        self._start(self._core.ordered(indices))

    def arrived(self, index: int) -> None:
        """A collective is over."""
        work, now_s = self.cluster.work, self.cluster.clock.now_s
        if index >= len(work.jobs):
            self._go_on()
            return
        self._under_way -= 1
        if not self._under_way:
            self._busy_ns += round(1e9 * now_s) - self._busy_since_ns
        self._start(self._core.finish(self._tasks[index]))
        for number, bundle in enumerate(work.bundles):
            if index in bundle.jobs:
                self._missing[number] -= 1
                if not self._missing[number] and self._is_stepped:
                    self._update(number, now_s)

    def _released(self, layer: int) -> None:
        jobs = enumerate(self.cluster.work.jobs)
        self._ready(index for index, job in jobs if job.layer == layer)
        if layer:
            return
        self._is_stepped = self._is_idle = True
        for number, missing in enumerate(self._missing):
            if not missing:
                self._update(number, self.cluster.clock.now_s)
        self._go_on()

    def _ready(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._ready_ns[index] = round(1e9 * self.cluster.clock.now_s)
            self._tasks[index].notify_ready()
            self._start(self._core.ready(self._tasks[index]))

    def _start(self, tasks: Sequence[CommTask]) -> None:
        cluster = self.cluster
        if tasks and not self._under_way:
            self._busy_since_ns = round(1e9 * cluster.clock.now_s)
        self._under_way += len(tasks)
        if not self.number:
            cluster.order.extend(task.index for task in tasks)
        if tasks and self._leads and cluster.planning.replayed is None:
            indices = [task.index for task in tasks]
            for first in range(0, len(indices), WORD_TASKS):
                cluster.words += 1
                cluster.send_word(self, indices[first : first + WORD_TASKS])
            if not cluster.control.fanout:
                for rank in cluster.ranks[1:]:
                    rank.word(indices)
        for task in tasks:
            cluster.issue(task.index)

    def _update(self, number: int, from_s: float) -> None:
        at_s = from_s + self.cluster.work.bundles[number].update_s
        self.cluster.clock.call_at(at_s, partial(self._is_updated, number))

    def _is_updated(self, number: int) -> None:
        self._updated[number] = True
        self._gather_next()
        self._go_on()

    def _gather_next(self) -> None:
        """Issues the gathers that wait for no layer that has not begun."""
        work = self.cluster.work
        while all(self._updated) and self._gather < len(work.gathers):
            if work.gathers[self._gather].issued_at >= self._layer:
                return
            self._gather += 1
            self.cluster.issue(len(work.jobs) + self._gather - 1)

    def _go_on(self) -> None:
        """Begins the next layer of the forward pass, if it can."""
        work, clock = self.cluster.work, self.cluster.clock
        if not self._is_idle or not self._may_begin(self._layer):
            return
        self._is_idle = False
        ends_s = clock.now_s + self._pace * work.forward_s[self._layer]
        self._layer += 1
        self._gather_next()
        clock.call_at(ends_s, self._passed)

    def _may_begin(self, layer: int) -> bool:
        work = self.cluster.work
        bundle = work.bundle_of[layer]
        return (bundle < 0 or self._updated[bundle]) and all(
            gather.layer > layer or self.cluster.has_arrived(len(work.jobs) + index)
            for index, gather in enumerate(work.gathers)
        )

    def _passed(self) -> None:
        if self._layer == len(self.cluster.work.forward_s):
            self.ended_s = self.cluster.clock.now_s
            return
        self._is_idle = True
        self._go_on()
