"""The second phase of a sharded update: what owners send when they have updated, turn by turn."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from bytesched.errors import SchedulerClosed
from bytesched.lane import Lane
from bytesched.order import Leading
from bytesched.policy import Priority
from bytesched.task import CommTask
from bytesched.transport import Done

from ...layout.plan import Plan
from .chunk_routes import FROM_OWNER, Message
from .exchange import Exchange
from .gathers import Gather
from .turns import Sent

__all__ = ["ParameterSpread"]


class _Turn:
    """A lane to each other rank.

    A message that another rank does not expect yet stays under way until it does. It may need
    something of an earlier turn to come as far: so no turn waits for a later one.
    """

    def __init__(self, exchange: Exchange, send: Callable[[CommTask, Done], None]) -> None:
        self.number = 0
        #: messages that have not left
        self.left = 0
        self.lanes = {
            peer: Lane(
                Leading(Priority()),
                credit_bytes=exchange.credit_bytes,
                name=f"parameters to {peer}",
            )
            for peer in exchange.peers
        }
        self.lane_numbers = {
            peer: exchange.add_lane(lane, send) for peer, lane in self.lanes.items()
        }


class ParameterSpread:
    """Sends what was staged of chunks that are owned here, and receives that of other owners.

    Args:
        exchange: of the same chunks, in whose lanes gradients of the same round go first.
        spread: called when what was sent of an owned chunk has left.
        gathered: called when a foreign chunk has come.
    """

    def __init__(
        self,
        exchange: Exchange,
        plan: Plan,
        *,
        spread: Callable[[CommTask], None],
        gathered: Callable[[CommTask], None],
    ) -> None:
        self._exchange = exchange
        self._plan = plan
        self._tell_spread = spread
        self._tell_gathered = gathered
        self._turns: list[_Turn] = []
        #: the last turn that was armed, and the last one before this round
        self._armed = self._late = 0
        #: of each owned chunk, its messages by rank
        self._messages: dict[int, list[Message]] = {}
        #: of each chunk on its way, the messages that have not left, and their turn
        self._unsent: dict[int, tuple[int, _Turn]] = {}
        #: of the turn that was armed last: which elements of each chunk are put in place
        self._parts: Mapping[CommTask, Sequence[slice]] = {}
        #: chunks of which something was expected in this round
        self._expected: set[int] = set()
        #: guards what follows
        self._lock = threading.Lock()
        #: by turn and chunk: what is staged or on its way
        self._staged: dict[tuple[int, int], torch.Tensor] = {}
        #: memory of chunks that have left
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        #: chunks on their way from here, and of each that is to come, how often
        self._leaving: set[int] = set()
        self._coming: Counter[int] = Counter()
        #: of each, what comes after the first time, and which elements of it are put in place
        self._late_parts: dict[int, list[tuple[torch.Tensor, Sequence[slice]]]] = {}
        self._closed = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._leaving and not self._coming

    def begin_round(self) -> None:
        """No turn that was armed by now waits for gradients that come from now on.

        Another rank may need its parameters to come as far as to receive those.
        """
        self._expected.clear()
        self._exchange.scheduler.act(partial(self._hasten, self._armed))

    def arm(
        self, turn: int, leaving: Sequence[CommTask], coming: Mapping[CommTask, Sequence[slice]]
    ) -> None:
        """The next `spread` of this rank may be of ``turn``. The user's thread."""
        self._armed, self._parts = turn, coming

    def expect(self, chunks: Iterable[CommTask], sent: Sent) -> None:
        """The owners of ``chunks``, which are others, send them next; front first."""
        listed = sorted(chunks, key=lambda chunk: chunk.index)
        if not listed:
            return
        with self._lock:
            self._coming.update(chunk.index for chunk in listed)
        self._exchange.scheduler.act(partial(self._begin_coming, len(listed), perf_counter_ns()))
        # At once: an owner may wait for these before it sends what is expected already.
        try:
            gathers = [self._gather(chunk) for chunk in listed]
        except RuntimeError as error:
            # The user's thread: the error that it becomes is raised where that waits.
            self._exchange.give_up(error)
        else:
            self._exchange.expect(gathers)

    def stage(self, chunk: CommTask, turn: int) -> torch.Tensor:
        """The memory that `spread` sends in ``turn``."""
        with self._lock:
            if self._closed:
                raise SchedulerClosed(f"{chunk!r} was to be spread after an end")
            if (turn, chunk.index) not in self._staged:
                self._staged[turn, chunk.index] = self._taken(self._plan.buffers[chunk.index])
            return self._staged[turn, chunk.index]

    def _taken(self, like: torch.Tensor) -> torch.Tensor:
        free = self._free.get((like.dtype, like.numel()))
        return free.pop() if free else torch.empty_like(like)

    def _give(self, memory: torch.Tensor) -> None:
        self._free.setdefault((memory.dtype, memory.numel()), []).append(memory)

    def spread(self, chunk: CommTask, turn: int) -> None:
        """Sends what was staged of ``chunk`` to all others; lower turns, from 1 on, go first."""
        with self._lock:
            self._leaving.add(chunk.index)
        now_ns = perf_counter_ns()
        self._exchange.scheduler.act(partial(self._begin_spread, chunk, turn, now_ns))

    def close(self) -> None:
        """Nothing is staged any more. Idempotent."""
        with self._lock:
            self._closed = True

    # -- events, in the exchange's turn ------------------------------------------------

    def _hasten(self, turn: int) -> list[CommTask]:
        self._late = turn
        return self._give_way()

    def _begin_spread(self, chunk: CommTask, number: int, now_ns: int) -> list[CommTask]:
        started: list[CommTask] = []
        turn = next((turn for turn in self._turns if turn.number == number), None)
        if turn is None:
            turn = self._new_turn(number)
            started += self._give_way()
        exchange = self._exchange
        exchange.busy.begins(now_ns)
        self._unsent[chunk.index] = len(exchange.peers), turn
        turn.left += len(exchange.peers)
        for message in self._messages_of(chunk):
            message.lane = turn.lane_numbers[message.peer]
            message.notify_ready()
            started += exchange.scheduler.core.ready(message)
        return started

    def _messages_of(self, chunk: CommTask) -> list[Message]:
        if chunk.index not in self._messages:
            self._messages[chunk.index] = [
                self._exchange.routes.message(chunk, peer, 0, self._has_left)
                for peer in self._exchange.peers
            ]
        return self._messages[chunk.index]

    def _new_turn(self, number: int) -> _Turn:
        """The lanes of a turn; those of one that is over serve another."""
        idle = next((turn for turn in self._turns if not turn.left), None)
        if idle is None:
            idle = _Turn(self._exchange, self._send)
            self._turns.append(idle)
        idle.number = number
        return idle

    def _give_way(self) -> list[CommTask]:
        """Turns wait for earlier ones, and for gradients of the round in which they were armed."""
        started: list[CommTask] = []
        for turn in self._turns:
            before = [other for other in self._turns if other.number < turn.number]
            for peer, number in turn.lane_numbers.items():
                first = () if turn.number <= self._late else self._exchange.first_to[peer]
                lanes = (*first, *(other.lanes[peer] for other in before))
                started += self._exchange.scheduler.core.yield_to(number, lanes)
        return started

    def _has_left(self, chunk: CommTask) -> None:
        """One message of ``chunk``."""
        left, turn = self._unsent[chunk.index]
        turn.left -= 1
        if left > 1:
            self._unsent[chunk.index] = left - 1, turn
            return
        del self._unsent[chunk.index]
        with self._lock:
            self._leaving.remove(chunk.index)
            self._give(self._staged.pop((turn.number, chunk.index)))
        self._exchange.busy.ends(perf_counter_ns())
        self._tell_spread(chunk)

    def _begin_coming(self, count: int, now_ns: int) -> list[CommTask]:
        for _ in range(count):
            self._exchange.busy.begins(now_ns)
        return []

    def _end_coming(self, chunk: CommTask) -> list[CommTask]:
        with self._lock:
            self._coming -= Counter([chunk.index])
            if chunk.index not in self._coming:
                # In the order of turns, whichever of them was waited for first.
                for memory, parts in self._late_parts.pop(chunk.index, ()):
                    for part in parts:
                        self._plan.buffers[chunk.index][part].copy_(memory[part])
                    self._give(memory)
        self._exchange.busy.ends(perf_counter_ns())
        self._tell_gathered(chunk)
        return []

    # -- messages ----------------------------------------------------------------------

    def _send(self, message: CommTask, done: Done) -> None:
        assert isinstance(message, Message)
        _, turn = self._unsent[message.chunk.index]
        memory = self._staged[turn.number, message.chunk.index]
        self._exchange.send(memory, message.peer, message, message.tag, done)

    def _gather(self, chunk: CommTask) -> Gather:
        owner = self._plan.owners[chunk.index]
        memory = self._plan.buffers[chunk.index]
        if chunk.index in self._expected:
            # What an earlier turn of this round sends of it may not be used yet, and only some of
            # it comes again.
            with self._lock:
                memory = self._taken(memory)
                late = self._late_parts.setdefault(chunk.index, [])
                late.append((memory, self._parts[chunk]))
        self._expected.add(chunk.index)
        work = self._exchange.receive(memory, owner, chunk, FROM_OWNER)
        return partial(self._arrived, chunk, owner, work)

    def _arrived(self, chunk: CommTask, owner: int, work: Any) -> None:
        self._exchange.messages.wait(work, owner, task=chunk.name)
        self._exchange.scheduler.act(partial(self._end_coming, chunk))

    def __repr__(self) -> str:
        return f"<ParameterSpread {len(self._unsent)} leaving, {self._coming.total()} coming>"
