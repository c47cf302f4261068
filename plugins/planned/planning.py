"""The plan of a session: measured rounds, the order made from them, and the ranks' agreement on it.

What ranks tell each other goes with the last bucket of a round, as one more operation, and is read
when the next backward pass begins: nobody waits for it. Every rank does the same in the same round,
as all of them count the same rounds of DDP.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from math import inf, isfinite
from statistics import median_low
from time import perf_counter_ns
from typing import Any, Final

import torch

from bytesched.ahead import CONCURRENT, ChunkTimes, Link, Planner, is_measured
from bytesched.observe import Observers

from .buckets import Bucket, Chunk
from .clocks import Clock
from .spans import Spans
from .splitting import Gradient
from .wire import Wire

__all__ = ["PLANNED_AGAIN_IN", "PLANNED_IN", "Planning", "Stage", "first_gates"]

#: rounds of a layout until there is a plan: it is compared, measured, told, and agreed on; and of
#: one whose gradients were measured in another
PLANNED_IN: Final = 4
PLANNED_AGAIN_IN: Final = 2
#: whose median tells how long one takes
_ITERATIONS: Final = 8

_S: Final = 1e9


log = logging.getLogger("bytesched")


class Stage(Enum):
    """How far the ranks are with their plan."""

    NEW = "the buckets are new"
    COMPARING = "the ranks compare their buckets"
    ALIKE = "buckets are alike"
    DIFFERENT = "buckets differ: chunks are sent as they become ready"
    MEASURING = "a round is measured"
    MEASURED = "a round has been measured"
    TELLING = "the ranks tell each other what they measured"
    PLANNED = "a plan has been made"
    AGREEING = "the ranks compare their plans"


_MEASURING: Final = (Stage.NEW, Stage.MEASURING)


class _Round:
    """What is measured of one round.

    Args:
        common: a moment before it that all ranks have in common, if it is known.
    """

    def __init__(self, common: Any) -> None:
        self.common = common
        #: moments of the clock, by chunk
        self.ready: dict[int, Any] = {}
        self.spans = Spans()


class Planning:
    """Makes the order of issue from measured rounds.

    Args:
        policy: which ready chunk goes first.
        credit_bytes: how far ahead of the link that is decided; 0: each time that it is free.
        gate_of: the first gate that needs a chunk, by its position in the forward pass.
        clock: of what sums chunks.
    """

    def __init__(
        self,
        wire: Wire,
        observers: Observers,
        *,
        policy: str,
        credit_bytes: int,
        gate_of: Callable[[Chunk], int],
        clock: Clock,
    ) -> None:
        self._wire = wire
        self._clock = clock
        self.observers = observers
        self._policy = policy
        self._credit_bytes = credit_bytes
        self._planner = Planner(policy, credit_bytes)
        self.gate_of = gate_of
        self.stage = Stage.NEW
        #: indices of chunks as they are issued; None: as they become ready
        self.order: Sequence[int] | None = None
        self._planned: list[int] = []
        #: rounds since the buckets were found alike
        self._rounds = 0
        self._chunks: dict[int, Chunk] = {}
        #: what is measured at the moment, or is to be told
        self.measured: _Round | None = None
        #: when the last sum of the round before was here, which all ranks have in common
        self._common: list[Any] = []
        self._last: Chunk | None = None
        #: what to do when the host has waited for a chunk, by index, where ends are not seen
        self.awaited: dict[int, Callable[[object], None]] = {}
        #: of the carrier, where ends of chunks are not seen
        self._wants_probe = False
        self._probe: Any = None
        self._round_began_ns = 0
        #: the latest iterations that were sent as the last one was
        self._iterations_ns: deque[int] = deque(maxlen=_ITERATIONS)
        #: what the ranks tell each other, and the work
        self._told: torch.Tensor | None = None
        self._telling: Any = None
        #: for how long something is under way in a round
        self.busy_ns = 0
        #: what the ranks have told last of chunks, by index, and of the carrier
        self._times: list[ChunkTimes] = []
        #: when their gradients were ready on the slowest rank, which holds in other buckets, too
        self._ready_s: dict[int, float] = {}
        self._link = Link(0.0, 0.0)

    def forget(self) -> None:
        """The buckets are others from now on."""
        self.stage, self.order, self._rounds = Stage.NEW, None, 0
        # Another layout need not be measured without a plan.
        as_ready_s = self._planner.as_ready_s
        self._planner = Planner(self._policy, self._credit_bytes, as_ready_s)
        self._count_anew()
        self._chunks.clear()
        self.awaited.clear()
        self._times = []
        self.measured = self._last = None

    def change(self, policy: str, credit_bytes: int) -> None:
        """Rounds are planned so from the next one on; the ranks tell each other nothing now."""
        self._policy, self._credit_bytes = policy, credit_bytes
        self.forget()
        self.busy_ns = 0

    def measure_again(self) -> None:
        """Rounds are measured as often as those of a new layout."""
        if self.stage is Stage.ALIKE:
            self._rounds = 0

    def close(self) -> None:
        """Lets go of what the ranks were telling each other."""
        self.forget()
        self._told = self._telling = None

    # -- a round -----------------------------------------------------------------------

    def round_begins(self) -> None:
        """The first chunk of a round is ready."""
        now_ns = perf_counter_ns()
        if self._round_began_ns:
            self._iterations_ns.append(now_ns - self._round_began_ns)
        self._round_began_ns = now_ns
        if self._wants_probe:
            self._wants_probe = False
            self._probe = self._clock.probe(self._wire)
        if self.stage is Stage.NEW:
            # For figures alone: nothing tells yet when other ranks begin.
            self.measured = _Round(None)
        elif self.stage is Stage.ALIKE:
            self._rounds += 1
            if is_measured(self._rounds):
                # Whatever this rank knows: the others go on with it.
                common = self._common[0] if self._common else None
                self.measured, self.stage = _Round(common), Stage.MEASURING

    def ready(self, chunks: Sequence[Chunk]) -> None:
        """These can be issued, and are `measured`."""
        if self.measured is not None and self.stage in _MEASURING:
            for chunk in chunks:
                self.measured.ready[chunk.index] = self._clock.moment()

    def issued(self, chunk: Chunk, *, is_last: bool) -> None:
        """``chunk`` was issued: the last one of its round, or one that is measured or observed."""
        measured = self.measured if self.stage in _MEASURING else None
        is_common = is_last and self.stage is not Stage.MEASURING
        if is_common:
            self._common, self._last = [], chunk
        if self._wire.has_streams or not (measured or is_common or self.observers.are_any):
            return
        now_ns = perf_counter_ns()
        if measured is not None:
            measured.spans.begin(chunk.index, now_ns)
        common = self._common if is_common else None
        ended = partial(self._ended, chunk, now_ns, measured, common)
        if self._wire.sees_ends:
            chunk.work.get_future().add_done_callback(ended)
        else:
            self.awaited[chunk.index] = ended

    def waited(self, chunk: Chunk) -> None:
        """What this thread does, or its stream queues, from now on comes after ``chunk``'s sum."""
        if (ended := self.awaited.pop(chunk.index, None)) is not None:
            ended(chunk.work)
        elif self._wire.has_streams and chunk is self._last and not self._common:
            self._common.append(self._clock.moment())

    def _ended(
        self,
        chunk: Chunk,
        issued_ns: int,
        measured: _Round | None,
        common: list[Any] | None,
        work: object,
    ) -> None:
        """The sum of ``chunk`` is here. A thread of the carrier, or the one that has waited."""
        now_ns = perf_counter_ns()
        if measured is not None:
            measured.spans.end(chunk.index, now_ns)
        if common is not None:
            common.append(now_ns)
        if self.observers.are_any:
            args = {"bytes": chunk.sent.nbytes, "chunk": chunk.index}
            self.observers.on_span("send", chunk.name, issued_ns, now_ns, args)

    def round_ends(self, buckets: Sequence[Bucket]) -> None:
        """All chunks of a round have been issued: what there is to tell goes behind them.

        Args:
            buckets: the layout from here on.
        """
        if self.stage is Stage.NEW:
            self._know(buckets)
            self._times = self._known_times(buckets)
            self._tell(_digest(self._layout()))
            self.stage = Stage.COMPARING
        elif self.stage is Stage.MEASURING:
            self.stage = Stage.MEASURED
        elif self.stage is Stage.MEASURED:
            # They may lie in other memory by now.
            self._know(buckets)
            self._tell(self._what_was_measured())
            self.stage = Stage.TELLING
        elif self.stage is Stage.PLANNED:
            self._tell(_digest(str(self._planned)))
            self.stage = Stage.AGREEING

    def _know(self, buckets: Sequence[Bucket]) -> None:
        # Not as they are issued: a rank that has joined issues chunks of other buckets.
        self._chunks = {chunk.index: chunk for bucket in buckets for chunk in bucket.chunks}

    def _tell(self, numbers: Sequence[float]) -> None:
        self._told = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._telling = self._wire.start_largest(self._told)

    def landed(self) -> None:
        """Nothing is under way: what the ranks told each other is here, too."""
        if self.measured is not None and self.measured.spans.is_complete:
            self.busy_ns = self.measured.spans.busy_ns()
        if self._telling is None or self._told is None:
            return
        self._wire.wait(self._telling, "what ranks tell each other")
        told, self._told, self._telling = self._told.tolist(), None, None
        if self.stage is Stage.COMPARING:
            self.measured = None
            is_alike = told[0] == -told[1] and self._policy != "fifo"
            self.stage = Stage.ALIKE if is_alike else Stage.DIFFERENT
            # Not here: this moment is not the same on all ranks.
            self._wants_probe = is_alike
            if not is_alike:
                self._times = []
            elif self._times:
                self._propose(self._planner.planned(self._times, self._link))
        elif self.stage is Stage.TELLING:
            self._plan(told)
        elif self.stage is Stage.AGREEING:
            self.stage = Stage.ALIKE
            if told[0] == -told[1]:
                self._adopt(self._planned)

    # -- the plan ----------------------------------------------------------------------

    def _layout(self) -> str:
        sizes = [(index, chunk.sent.numel()) for index, chunk in sorted(self._chunks.items())]
        settings = f"{self._policy} {self._credit_bytes} {torch.__version__}"
        return f"{sizes} {settings} {'known' if self._times else 'new'}"

    def _known_times(self, buckets: Sequence[Bucket]) -> list[ChunkTimes]:
        """Of a new layout, from when gradients were ready before; none where one is new."""
        ready_s = self._ready_s
        if any(id(member.parameter) not in ready_s for here in buckets for member in here.members):
            return []
        return [
            ChunkTimes(
                chunk.sent.nbytes,
                max(ready_s[id(member.parameter)] for member in bucket.members),
                self.gate_of(chunk),
            )
            for bucket in buckets
            for chunk in bucket.chunks
        ]

    def _what_was_measured(self) -> list[float]:
        """What this rank tells of the measured round; the largest numbers of all count."""
        measured, self.measured = self.measured, None
        chunks = sorted(self._chunks)
        gates = [-float(self.gate_of(self._chunks[index])) for index in chunks]
        if measured is None or measured.common is None or measured.ready.keys() != set(chunks):
            return [*(inf for _ in chunks), *gates, inf, 0.0]
        if self._probe is not None:
            seconds_per_byte = self._clock.seconds_per_byte(self._probe)
        else:
            nbytes = sum(self._chunks[index].sent.nbytes for index in chunks)
            is_complete = measured.spans.is_complete
            seconds_per_byte = measured.spans.busy_ns() / _S / nbytes if is_complete else inf
        seconds = self._clock.seconds
        return [
            *(seconds(measured.common, measured.ready[index]) for index in chunks),
            *gates,
            seconds_per_byte,
            median_low(self._iterations_ns) / _S if self._iterations_ns else 0.0,
        ]

    def _plan(self, told: Sequence[float]) -> None:
        """A plan from what all ranks have told; none where one of them had nothing to tell."""
        count = len(self._chunks)
        ready_s, gates, (seconds_per_byte, iteration_s) = told[:count], told[count:-2], told[-2:]
        self.stage = Stage.ALIKE
        if not all(map(isfinite, ready_s)) or not isfinite(seconds_per_byte):
            return
        log.debug(
            "an iteration of %.1f ms, the last chunk ready after %.1f ms, %.1f MB/s, %s",
            1e3 * iteration_s,
            1e3 * max(ready_s),
            1e-6 / max(seconds_per_byte, 1e-12),
            "as ready" if self.order is None else "as planned",
        )
        indices = sorted(self._chunks)
        self._times = [
            ChunkTimes(self._chunks[index].sent.nbytes, ready, -int(gate))
            for index, ready, gate in zip(indices, ready_s, gates, strict=True)
        ]
        for index, ready in zip(indices, ready_s, strict=True):
            members = self._chunks[index].bucket.members
            self._ready_s.update({id(member.parameter): ready for member in members})
        self._link = Link(seconds_per_byte, 0.0, CONCURRENT if self._wire.sees_ends else 1)
        is_planned = self.order is not None
        order = self._planner.measured(self._times, self._link, iteration_s, is_planned=is_planned)
        if order is None:
            self._adopt(None)
        else:
            self._propose(order)

    def _propose(self, order: Sequence[int]) -> None:
        """To be adopted when the ranks have agreed on it."""
        indices = sorted(self._chunks)
        if len(order) == len(indices):
            self._planned = [indices[position] for position in order]
            self.stage = Stage.PLANNED

    def _adopt(self, order: Sequence[int] | None) -> None:
        if (order is None) is not (self.order is None):
            self._count_anew()
        self.order = order

    def _count_anew(self) -> None:
        """The iteration under way has begun otherwise."""
        self._iterations_ns.clear()
        self._round_began_ns = 0

    def gradients(self, buckets: Sequence[Bucket]) -> list[Gradient]:
        """What all ranks have told of those in ``buckets``, in the order in which they are ready.

        Without times before they have done so. The same on all ranks.
        """
        # By index: a rank that has joined has sent other buckets.
        ready_s = {
            index: chunk.ready_s
            for index, chunk in zip(sorted(self._chunks), self._times, strict=False)
        }
        return [
            Gradient(
                id(member.parameter),
                member.view.nbytes,
                number,
                ready_s.get(bucket.chunks[-1].index, 0.0),
            )
            for number, bucket in enumerate(buckets)
            for member in bucket.members
        ]

    @property
    def seconds_per_byte(self) -> float:
        """Of what carries chunks, as it is beside compute; 0: not known."""
        return self._link.seconds_per_byte

    def __repr__(self) -> str:
        order = "as ready" if self.order is None else "as planned"
        return f"<Planning: {self.stage.value}; chunks are sent {order}>"


def _digest(text: str) -> list[float]:
    """A number and its negative, which are exact: all ranks have one text if the largest agree."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")
    return [float(number), -float(number)]


def first_gates(positions: Mapping[int, int]) -> Callable[[Chunk], int]:
    """The first gate that needs a chunk, from the position of each parameter, by its id."""

    def gate_of(chunk: Chunk) -> int:
        gates = (
            positions.get(id(member.parameter), len(positions))
            for member in chunk.bucket.members
            if chunk in member.chunks
        )
        return min(gates, default=len(positions))

    return gate_of
