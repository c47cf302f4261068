"""The leader's protocol: which chunk is next, from rank 0 to the others, over a group of its own.

Per iteration the leader either sends the chunks it starts, in batches, or, when an order has
converged, one message: the order known to all goes on. Every iteration's last message holds how
the *next* one is ordered, so that a replayed iteration begins without waiting.
"""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch

from bytesched.errors import TransportError
from bytesched.order import OrderLearner
from bytesched.plugins.c10d.group import Group
from bytesched.task import CommTask

__all__ = ["Follower", "Leader"]

#: A message: how the next iteration is ordered, the number of chunks named, their indices.
_BATCH: Final = 30
_WORDS: Final = _BATCH + 2
_TAG: Final = 7
#: for messages that are under way when a session ends: what they say has happened already
_LAST: Final = timedelta(seconds=1)
#: what fails if a message cannot be sent or received
_TASK: Final = "the leader's order"

#: An order has stopped to fit when its head is late by this much for so many rounds.
_LATE_NS: Final = 5_000_000
_LATE_ROUNDS: Final = 3

#: The next iteration is led, replays the order known to all, or replays the one that follows.
_LEAD, _REPLAY, _REPLAY_NEW = 0, 1, 2


class Leader:
    """Rank 0's side; every method is called where its scheduler handles events.

    Args:
        group: the control group.
        chunks: how many there are in an iteration.
        replay: whether an order that has converged may be replayed.
        blocked_ns: for how long, in all, nothing was on the wire because the head of the order
            was not ready while other chunks were.
    """

    def __init__(
        self, group: Group, chunks: int, *, replay: bool, blocked_ns: Callable[[], int]
    ) -> None:
        self._group = group
        self._chunks = chunks
        self._learner = OrderLearner() if replay else None
        self._drift = Drift(blocked_ns)
        self._order: list[int] = []
        self._mode = _LEAD
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self.messages = 0
        #: the order all ranks replay now, or None while rank 0 leads
        self.replayed: list[int] | None = None

    def change(self, chunks: int, *, replay: bool) -> None:
        """Between two rounds: so many chunks from now on, and none of their order is known."""
        self._chunks = chunks
        self._learner = OrderLearner() if replay else None
        self._mode = _LEAD
        self.replayed = None

    def close(self) -> None:
        """Lets go of messages, once they have arrived: each keeps the connections open."""
        with contextlib.suppress(TransportError):
            while self._sending:
                self._group.wait_message(self._sending.popleft()[0], task=_TASK, limit=_LAST)
        self._sending.clear()

    def announce(self, tasks: Sequence[CommTask]) -> None:
        """These start now, in this order."""
        if not self._order:
            self._forget_sent()
        self._order.extend(task.index for task in tasks)
        whole = len(self._order) == self._chunks
        if self._mode == _LEAD:
            indices = self._order[-len(tasks) :]
            following, converged = self._next() if whole else (_LEAD, None)
            for first in range(0, len(indices), _BATCH):
                self._send(following, indices[first : first + _BATCH])
            if converged is not None:
                self._broadcast(torch.tensor(converged, dtype=torch.int64, device="cpu"))
                self.replayed = converged
        elif whole:
            following = _LEAD if self._drift.seen() else _REPLAY
            self._send(following, [])
            if following == _LEAD:
                self._learner = OrderLearner()
                self.replayed = None
        if whole:
            self._mode = _REPLAY if following else _LEAD
            self._order = []

    def _next(self) -> tuple[int, list[int] | None]:
        if self._learner is None:
            return _LEAD, None
        self._learner.observe(self._order)
        converged = self._learner.converged()
        return (_LEAD, None) if converged is None else (_REPLAY_NEW, converged)

    def _send(self, following: int, indices: Sequence[int]) -> None:
        words = array("q", (following, len(indices), *indices, *(0,) * (_BATCH - len(indices))))
        # One for each chunk: operations on tensors would take ten times as long.
        self._broadcast(torch.frombuffer(words, dtype=torch.int64))

    def _broadcast(self, message: torch.Tensor) -> None:
        self.messages += 1
        try:
            for rank in range(1, self._group.size):
                work = self._group.backend.send([message], rank, _TAG)
                self._sending.append((work, message))
        except RuntimeError as error:
            raise self._group.error(error, task=_TASK) from error

    def _forget_sent(self) -> None:
        """Lets go of the last iteration's messages, which Gloo has read from our memory by now."""
        while self._sending:
            work, _ = self._sending.popleft()
            self._group.wait_message(work, task=_TASK)


class Drift:
    """Whether a replayed order has stopped to fit: its head is late, round after round."""

    def __init__(self, blocked_ns: Callable[[], int]) -> None:
        self._blocked_ns = blocked_ns
        self._before_ns = 0
        self._late_rounds = 0

    def seen(self) -> bool:
        """Asked once per replayed round."""
        now_ns = self._blocked_ns()
        late = now_ns - self._before_ns > _LATE_NS
        self._before_ns = now_ns
        self._late_rounds = self._late_rounds + 1 if late else 0
        if self._late_rounds < _LATE_ROUNDS:
            return False
        self._late_rounds = 0
        return True


class Follower:
    """The other ranks' side: a thread that receives the order while an iteration goes on.

    It listens only between the first ready chunk of an iteration and the last message about it,
    so that an hour of evaluation between two iterations is not a timeout.
    """

    def __init__(
        self,
        group: Group,
        chunks: int,
        *,
        ordered: Callable[[Sequence[int]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._group = group
        self._chunks = chunks
        self._ordered = ordered
        self._on_error = on_error
        self._iterations = threading.Semaphore(0)
        #: iterations, each counted by one thread
        self._begun = self._ended = 0
        #: chunks of this iteration
        self._ready = 0
        self._mode = _LEAD
        self._closed = False
        self._idle = threading.Condition()
        #: the order all ranks replay now, or None while rank 0 leads
        self.replayed: list[int] | None = None
        self._thread = threading.Thread(target=self._run, name="bytesched-follower", daemon=True)
        self._thread.start()

    def chunk_ready(self) -> None:
        """One more chunk is ready here; with the first of an iteration, listening begins."""
        if not self._ready:
            self._begun += 1
            self._iterations.release()
        self._ready = (self._ready + 1) % self._chunks

    def change(self, chunks: int) -> None:
        """Between two rounds: so many chunks from now on, led by rank 0."""
        with self._idle:
            # The leader's message about a replayed round may come after its last chunk.
            has_ended = self._idle.wait_for(
                lambda: self._ended == self._begun or not self._thread.is_alive(),
                self._group.timeout_s,
            )
        if not has_ended:
            raise self._group.error(TimeoutError("timed out"), task=_TASK)
        self._chunks = chunks
        self._mode = _LEAD
        self.replayed = None

    def close(self) -> None:
        """Ends the thread; a message that it waits for will not come any more."""
        self._closed = True
        self._iterations.release()
        if self._ended != self._begun:
            self._group.abort()
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            while self._iterations.acquire() and not self._closed:
                self._mode = self._led() if self._mode == _LEAD else self._replay()
                with self._idle:
                    self._ended += 1
                    self._idle.notify_all()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is waited for
            self._on_error(error)

    def _led(self) -> int:
        remaining = self._chunks
        following = _LEAD
        while remaining > 0:
            following, indices = self._receive()
            self._ordered(indices)
            remaining -= len(indices)
        self.replayed = None
        if following == _REPLAY_NEW:
            order = torch.empty(self._chunks, dtype=torch.int64, device="cpu")
            self._receive_into(order)
            self.replayed = order.tolist()
        return following

    def _replay(self) -> int:
        assert self.replayed is not None
        self._ordered(self.replayed)
        following, _ = self._receive()
        if following == _LEAD:
            self.replayed = None
        return following

    def _receive(self) -> tuple[int, list[int]]:
        message = torch.empty(_WORDS, dtype=torch.int64, device="cpu")
        self._receive_into(message)
        words = message.tolist()
        return words[0], words[2 : 2 + words[1]]

    def _receive_into(self, message: torch.Tensor) -> None:
        try:
            work = self._group.backend.recv([message], 0, _TAG)
        except RuntimeError as error:
            raise self._group.error(error, task=_TASK) from error
        self._group.wait_message(work, task=_TASK)
