"""All-reduces of two ranks in two halves: sums to their owners, and from there back to the other.

Every operation has its place in one order, the same on both ranks, whatever a script does
meanwhile: the sums of a round as they become ready, then numbers about them, then the way back. The
last sum to end lets the rest go, in the carrier's own thread. With more ranks whole tensors keep
too few links busy, and parts of tensors would have other norms: there gradients go whole.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Final, TypeAlias

import torch

from bytesched.errors import PluginError, SchedulerTimeout
from bytesched.observe import Observers

from ..figures.meter import Meter
from .buckets import Chunk
from .questions import Foreseen
from .spans import Carried
from .wire import Exchanging

#: how many buckets a chunk waits for one of the other owner: alone it leaves one direction idle
_PATIENCE: Final = 4

_Queue: TypeAlias = deque[tuple[int, Chunk]]


class _Pair:
    """What this rank sums, and what the other one does; one of them may be missing."""

    def __init__(self, by_owner: Sequence[Chunk | None], rank: int) -> None:
        self._own, self._other = by_owner[rank], by_owner[1 - rank]
        first = self._own or self._other
        assert first is not None
        #: after which it is named: the same on both ranks in number, not in name
        self.first = first
        self._received: torch.Tensor | None = None

    def begin_sum(self, wire: Exchanging) -> Any:
        """Begins to send what the other rank sums, and to take what this one does."""
        self._received = torch.empty_like(self._memory(self._own))
        return wire.exchange(self._received, self._memory(self._other))

    def add(self) -> None:
        """Adds up what has come."""
        if self._own is not None and self._received is not None:
            # In whatever order: of two numbers it is one sum.
            with torch.no_grad():
                self._own.sent.add_(self._received)
        self._received = None

    def begin_return(self, wire: Exchanging) -> Any:
        """Begins to send what this rank has summed, and to take what the other one has."""
        work = wire.exchange(self._memory(self._other), self._memory(self._own))
        for chunk in (self._own, self._other):
            if chunk is not None:
                chunk.work = work
        return work

    def _memory(self, chunk: Chunk | None) -> torch.Tensor:
        # Not over the memory of a bucket, whose uses are counted.
        return torch.empty(0, dtype=self.first.sent.dtype) if chunk is None else chunk.sent


class Halves:
    """The chunks of one round after another.

    Args:
        observers: they are told when something was under way.
    """

    def __init__(self, wire: Exchanging, meter: Meter, observers: Observers) -> None:
        self._wire = wire
        self._meter = meter
        self.foreseen = Foreseen(wire.rank, self._common_numbers)
        self._lock = threading.Lock()
        #: of this round
        self._chunks: list[Chunk] = []
        #: by kind of number and owner, those without a partner yet, with the number of their bucket
        self._waiting: dict[torch.dtype, tuple[_Queue, _Queue]] = {}
        self._buckets = 0
        #: first halves, with the names of what they carry
        self._summing: list[tuple[Any, str]] = []
        #: how many of them have not ended, one more until all have begun
        self._left = 0
        #: all of them have begun
        self.is_round_whole = False
        #: the last one has ended, and the rest is under way or has failed
        self._is_handed_on = threading.Event()
        self._numbers: torch.Tensor | None = None
        self._telling: Any = None
        self._error: Exception | None = None
        self.carried = Carried(observers)

    def round_begins(self) -> None:
        """Nothing of the last round is under way."""
        self.forget()
        self._left = 1
        self._is_handed_on.clear()
        self._numbers = self._error = None
        self.carried.round_begins()
        self.foreseen.round_begins()

    def start(self, chunks: Sequence[Chunk]) -> None:
        """The chunks of a bucket are ready: first halves begin, some with those of the next one."""
        self._chunks += chunks
        self._buckets += 1
        for chunk in chunks:
            if chunk.owner is None:
                chunk.work = self._begin_sum(chunk, partial(self._wire.start, chunk.sent))
            else:
                waiting = self._waiting.setdefault(chunk.sent.dtype, (deque(), deque()))
                waiting[chunk.owner].append((self._buckets, chunk))
        self._begin_pairs(self._buckets - _PATIENCE)

    def all_started(self) -> None:
        """No more chunks follow in this round."""
        self._begin_pairs(self._buckets)
        self.is_round_whole = True
        self._ended()

    def _begin_pairs(self, oldest: int) -> None:
        """Begins those that have a partner, and those up to the bucket ``oldest``."""
        for waiting in self._waiting.values():
            while all(waiting) or any(one and one[0][0] <= oldest for one in waiting):
                by_owner = [one.popleft()[1] if one else None for one in waiting]
                pair = _Pair(by_owner, self._wire.rank)
                self._begin_sum(pair.first, partial(pair.begin_sum, self._wire), pair.add)

    def _begin_sum(
        self, chunk: Chunk, begin: Callable[[], Any], ended: Callable[[], None] = lambda: None
    ) -> Any:
        with self._lock:
            self._left += 1
        work = self.carried.begin(begin, chunk.name, chunk.sent.nbytes, chunk.index)
        self._summing.append((work, chunk.name))
        work.get_future().add_done_callback(partial(self._summed, ended))
        return work

    # -- in a thread of the carrier, mostly --------------------------------------------

    def _summed(self, ended: Callable[[], None], future: Any) -> None:
        """A first half has ended."""
        try:
            # Whoever waits for it is told of an error; the second half never begins then.
            future.wait()
            ended()
        except Exception as error:  # noqa: BLE001 - it is raised where the sum is waited for
            self._fail(error)
            return
        self._ended()

    def _ended(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            try:
                self._hand_on()
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    raise
            self._is_handed_on.set()

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            error = PluginError(f"{type(error).__name__} while sums were handed on")
        self._error = self._error or error
        self._is_handed_on.set()

    def _hand_on(self) -> None:
        self._numbers = self.foreseen.measured(self._chunks)
        self._telling = self._wire.start(self._numbers)
        # What backward computes last is needed first.
        for kind in self._waiting:
            chunks = [chunk for chunk in reversed(self._chunks) if chunk.sent.dtype == kind]
            dealt = ([chunk for chunk in chunks if chunk.owner == owner] for owner in (0, 1))
            for by_owner in zip_longest(*dealt):
                pair = _Pair(by_owner, self._wire.rank)
                chunk, begin = pair.first, partial(pair.begin_return, self._wire)
                self.carried.begin(begin, chunk.name, chunk.sent.nbytes, ~chunk.index)
        # What has ended keeps the memory of what came.
        self._summing = []

    # -- waits -------------------------------------------------------------------------

    def wait_for_sums(self) -> None:
        """Returns when what this rank owns is summed, and everything else is under way.

        Raises `TransportError`.
        """
        for work, name in self._summing:
            if not self._is_handed_on.is_set():
                self._wire.wait(work, name)
        if not self._is_handed_on.wait(self._wire.timeout_s):
            raise SchedulerTimeout(
                f"sums are not handed on after {self._wire.timeout_s:g} s", rank=self._wire.rank
            )
        if self._error is not None:
            for work, name in self._summing:
                # If it is the carrier's, with the name of what it carried.
                self._wire.wait(work, name)
            raise self._error

    def _common_numbers(self) -> torch.Tensor:
        """What all ranks have measured of what they own, added up; waits for it."""
        began = self._meter.moment()
        self.wait_for_sums()
        assert self._numbers is not None
        self._wire.wait(self._telling, "numbers about gradients")
        waited_ns = self._meter.waited("norm of all gradients", began)
        self._meter.causes.asked(waited_ns)
        return self._numbers

    def works(self) -> Iterator[Any]:
        """What may be under way beside the works of chunks."""
        yield from (work for work, _ in self._summing)
        if self._telling is not None:
            yield self._telling

    def forget(self) -> None:
        """Nothing is under way any more: works keep connections open."""
        self._chunks.clear()
        self._waiting.clear()
        self._buckets = 0
        self._summing.clear()
        self._telling = None
        self.is_round_whole = False

    def let_go(self) -> None:
        """The same, and nothing of gradients is kept."""
        self.forget()
        self._numbers = None
        self.foreseen.forget()
