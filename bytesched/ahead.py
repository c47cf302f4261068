"""The order in which chunks are issued, planned from measured times.

The scheduler's own core runs on measured times in place of a clock: its policy chooses among the
chunks that are ready each time that the credit lets one go, and a modelled link returns the credit.
Of the orders of several rounds that one is taken which all of these rounds have least to wait with.
Equal numbers give equal orders: ties go by index, and nothing here depends on the rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from bytesched.admission import Foreseen
from bytesched.core import SchedulerCore
from bytesched.order import Following, Leading
from bytesched.policy import Prophet, named_policy
from bytesched.task import CommTask

__all__ = [
    "CONCURRENT",
    "ChunkTimes",
    "Link",
    "Planner",
    "exposed_s",
    "gate_times",
    "is_measured",
    "plan_order",
    "waited_s",
]

#: measured iterations of a plan that have to be slower than without it, before it is left
_PATIENCE: Final = 2
#: rounds that a plan is made for
_ROUNDS: Final = 4
#: How many times as slow as measured the link may be, which no round tells: where it is, what is
#: ready last and needed first is behind what could have waited.
_SLOWER: Final = (1.0, 1.25, 1.6)
#: collectives that Gloo has under way at a time: it starts them in order
CONCURRENT: Final = 2

#: from which `Foreseen` learns
_LEARNED_ROUNDS: Final = 3


def is_measured(number: int) -> bool:
    """Whether the round of this ``number`` of a layout is, from 1 on; between two one is not."""
    return number > 0 and (number + 3) & (number + 2) == 0


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """What has been measured of one chunk. The slices of a bucket have one time between them."""

    nbytes: int
    #: when it is ready on the last rank, after a moment that all ranks have in common
    ready_s: float
    #: the first gate that needs it, by its position in the forward pass
    gate: int


@dataclass(frozen=True, slots=True)
class Link:
    """What carries chunks, as it is beside compute.

    An operation takes its constant, in which it delays no other one, and then its bytes: all that
    are as far as that share the rate.
    """

    seconds_per_byte: float
    seconds_per_chunk: float
    #: operations under way at once, started in the order of issue
    concurrent: int = 1

    def __post_init__(self) -> None:
        if self.seconds_per_byte < 0 or self.seconds_per_chunk < 0 or self.concurrent < 1:
            raise ValueError(f"no such link: {self}")

    def alone_s(self, nbytes: int) -> float:
        """How long a chunk takes while no other one is under way."""
        return self.seconds_per_chunk + self.seconds_per_byte * nbytes


class Planner:
    """What was measured of one layout of chunks, and the order that is planned from it.

    Args:
        policy, credit_bytes: as for `plan_order`.
        as_ready_s: what an iteration took in which chunks were sent as they became ready.
    """

    def __init__(self, policy: str, credit_bytes: int, as_ready_s: float = inf) -> None:
        self._policy = policy
        self._credit_bytes = max(1, credit_bytes)
        #: the latest rounds, and the orders that were planned for each of them
        self._rounds: deque[tuple[Sequence[ChunkTimes], Link]] = deque(maxlen=_ROUNDS)
        self._orders: deque[list[list[int]]] = deque(maxlen=_ROUNDS)
        self.as_ready_s = as_ready_s
        #: the latest ones in which they were sent as planned
        self._as_planned_s: deque[float] = deque(maxlen=_PATIENCE)

    def measured(
        self, chunks: Sequence[ChunkTimes], link: Link, iteration_s: float, *, is_planned: bool
    ) -> list[int] | None:
        """The order from now on; None: as chunks become ready, as a plan was slower than that.

        Args:
            iteration_s: of iterations like that of the measured round.
            is_planned: whether that was sent as planned.
        """
        if is_planned:
            self._as_planned_s.append(iteration_s)
        else:
            self.as_ready_s = iteration_s
            self._as_planned_s.clear()
        if len(self._as_planned_s) == _PATIENCE and min(self._as_planned_s) > self.as_ready_s:
            # Chunks come later than the plan has them: it keeps others waiting for nothing.
            return None
        return self.planned(chunks, link)

    def planned(self, chunks: Sequence[ChunkTimes], link: Link) -> list[int]:
        """The same for a round that is only expected."""
        self._rounds.append((chunks, link))
        self._orders.append([self._order(chunks, link, slower) for slower in _SLOWER])
        orders = [order for some in self._orders for order in some]
        return min(orders, key=lambda order: sum(waited_s(order, *each) for each in self._rounds))

    def _order(self, chunks: Sequence[ChunkTimes], link: Link, slower: float) -> list[int]:
        slow = replace(link, seconds_per_byte=slower * link.seconds_per_byte)
        return plan_order(chunks, slow, policy=self._policy, credit_bytes=self._credit_bytes)


def waited_s(order: Sequence[int], chunks: Sequence[ChunkTimes], link: Link) -> float:
    """`exposed_s` as far as measured rounds tell it, by a small part of its work.

    Between two gates forward takes half as long as backward does, and chunks land one by one.
    """
    issued_s = free_s = -inf
    there_s: dict[int, float] = {}
    complete_s: dict[int, float] = {}
    for chunk in (chunks[index] for index in order):
        issued_s = max(issued_s, chunk.ready_s)
        free_s = max(free_s, issued_s) + link.alone_s(chunk.nbytes)
        there_s[chunk.gate] = free_s
        complete_s[chunk.gate] = max(chunk.ready_s, complete_s.get(chunk.gate, -inf))
    now_s = last_s = _forward_s(chunks)
    waited_s = 0.0
    for gate in sorted(there_s):
        now_s += max(0.0, last_s - complete_s[gate]) / 2
        waited_s += max(0.0, there_s[gate] - now_s)
        now_s, last_s = max(now_s, there_s[gate]), complete_s[gate]
    return waited_s


def plan_order(
    chunks: Sequence[ChunkTimes], link: Link, *, policy: str = "priority", credit_bytes: int = 1
) -> list[int]:
    """Indices of ``chunks`` in the order in which they are issued.

    Args:
        policy: one of `bytesched.policy.policy_names`.
        credit_bytes: how far ahead of the link it is decided; with 1 each time that it is free.
    """
    carrier, chosen = _Carrier(link), named_policy(policy)
    foreseen = Foreseen(len(chunks), lambda: carrier.now_s) if isinstance(chosen, Prophet) else None
    core = SchedulerCore(Leading(chosen), credit_bytes=credit_bytes, admission=foreseen)
    for _ in range(_LEARNED_ROUNDS if foreseen else 0):
        _run(core, chunks, carrier)
    return _run(core, chunks, carrier)[0]


def gate_times(
    order: Sequence[int], chunks: Sequence[ChunkTimes], link: Link, gates: Sequence[float]
) -> list[float]:
    """When the forward pass has passed each gate; it begins when the last chunk is ready.

    A chunk is issued when it is ready and all before it in ``order`` have been issued.

    Args:
        gates: compute time between each gate and the next one; what comes after the last one.

    Raises ValueError if ``order`` is none of ``chunks``, or a gate is not among ``gates``.
    """
    if sorted(order) != list(range(len(chunks))):
        raise ValueError(f"{list(order)} is no order of {len(chunks)} chunks")
    if any(not 0 <= chunk.gate < len(gates) for chunk in chunks):
        raise ValueError(f"there are {len(gates)} gates, and not those of {list(chunks)}")
    core = SchedulerCore(Following(), credit_bytes=1 + sum(chunk.nbytes for chunk in chunks))
    core.ordered(order)
    landed_s = _run(core, chunks, _Carrier(link))[1]
    there_s = [-inf] * len(gates)
    for chunk, at_s in zip(chunks, landed_s, strict=True):
        there_s[chunk.gate] = max(there_s[chunk.gate], at_s)
    now_s = _forward_s(chunks)
    passed_s: list[float] = []
    for at_s, compute_s in zip(there_s, gates, strict=True):
        passed_s.append(max(now_s, at_s))
        now_s = passed_s[-1] + compute_s
    return passed_s


def exposed_s(
    order: Sequence[int], chunks: Sequence[ChunkTimes], link: Link, gates: Sequence[float]
) -> float:
    """How long the forward pass waits at gates in all; arguments as for `gate_times`."""
    passed_s = gate_times(order, chunks, link, gates)
    return passed_s[-1] - _forward_s(chunks) - sum(gates[:-1]) if passed_s else 0.0


@dataclass(slots=True)
class _Operation:
    """A chunk under way: what is left of its constant, and then of its bytes at the full rate."""

    task: CommTask
    constant_s: float
    bytes_s: float


class _Carrier:
    """Operations over a link, in a time that moves when told."""

    def __init__(self, link: Link) -> None:
        self.now_s = 0.0
        self._link = link
        self._issued: deque[CommTask] = deque()
        self._under_way: list[_Operation] = []

    @property
    def next_s(self) -> float:
        """When something is over next, if nothing else is issued."""
        return self.now_s + min(self._left_s(), default=inf)

    def issue(self, tasks: Sequence[CommTask] = ()) -> None:
        """``tasks`` are under way as soon as those before them let them."""
        self._issued.extend(tasks)
        while self._issued and len(self._under_way) < self._link.concurrent:
            task = self._issued.popleft()
            bytes_s = self._link.seconds_per_byte * task.nbytes
            self._under_way.append(_Operation(task, self._link.seconds_per_chunk, bytes_s))

    def move_to(self, at_s: float) -> list[CommTask]:
        """What has landed by ``at_s``, which is not after `next_s`."""
        left_s, passed_s, is_next = self._left_s(), at_s - self.now_s, at_s >= self.next_s
        shared_s = passed_s / max(1, self._sharing)
        for each, one_s in zip(self._under_way, left_s, strict=True):
            # Rounding may leave a little of what is over, too little for time to move on.
            is_over = is_next and one_s == min(left_s)
            if each.constant_s:
                each.constant_s = 0.0 if is_over else max(0.0, each.constant_s - passed_s)
            else:
                each.bytes_s = 0.0 if is_over else max(0.0, each.bytes_s - shared_s)
        self.now_s = at_s
        landed = [each.task for each in self._under_way if not each.constant_s + each.bytes_s]
        self._under_way = [each for each in self._under_way if each.constant_s + each.bytes_s]
        self.issue()
        return landed

    def _left_s(self) -> list[float]:
        """Of each one, until its constant is over, or then its bytes."""
        sharing = self._sharing
        return [each.constant_s or each.bytes_s * sharing for each in self._under_way]

    @property
    def _sharing(self) -> int:
        return sum(not each.constant_s for each in self._under_way)


def _run(
    core: SchedulerCore, chunks: Sequence[ChunkTimes], carrier: _Carrier
) -> tuple[list[int], list[float]]:
    """One round of ``core``: the indices as they start, and when each one has landed."""
    tasks: list[CommTask] = []
    for index, chunk in enumerate(chunks):
        tasks.append(CommTask(str(index), start_at=0, stop_at=chunk.nbytes, priority=chunk.gate))
        tasks[-1].index = index
    order: list[int] = []
    landed_s = [0.0] * len(tasks)
    coming = deque(sorted((chunk.ready_s, index) for index, chunk in enumerate(chunks)))
    coming.append((inf, len(tasks)))
    carrier.now_s = coming[0][0]
    while (at_s := min(coming[0][0], carrier.next_s)) < inf:
        # Held: whatever happens at one moment is known before it is decided.
        core.hold()
        for task in carrier.move_to(at_s):
            landed_s[task.index] = at_s
            core.finish(task)
        while coming[0][0] <= at_s:
            task = tasks[coming.popleft()[1]]
            task.notify_ready()
            core.ready(task)
        started = core.release()
        order += [task.index for task in started]
        carrier.issue(started)
    return order, landed_s


def _forward_s(chunks: Sequence[ChunkTimes]) -> float:
    """When the forward pass begins."""
    return max((chunk.ready_s for chunk in chunks), default=0.0)
