"""Rank 0's words on their way: which chunks are next, down a tree over a group of its own.

What is said, and when nothing is, is decided by `bytesched.course`; here are messages and threads.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from bytesched.course import Course, Words
from bytesched.task import CommTask
from bytesched.tree import WORD_TASKS, children, parent

from .group import Group

__all__ = ["Follower", "Largest", "Leader"]

_TAG: Final = 7
#: for words that are under way when a session ends: those of a round that is over have been heard,
#: and those of one that is given up will not be
_LAST_S: Final = 1.0
#: what fails if a message cannot be sent or received
_TASK: Final = "the leader's order"
_PLAN: Final = "the order to replay"


class _Sending:
    """Messages from one rank to those that hear from it; sent by one thread at a time."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._children = children(group.rank, group.size)
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, message: torch.Tensor) -> None:
        try:
            for rank in self._children:
                work = self._group.send(message, rank, _TAG)
                self._under_way.append((work, message))
        except RuntimeError as error:
            raise self._group.error(error, task=_TASK) from error

    def forget(self) -> None:
        """Lets go of the last round's messages, which Gloo has read from our memory by now."""
        while self._under_way:
            work, _ = self._under_way.popleft()
            self._group.wait_message(work, task=_TASK)

    def close(self) -> None:
        """Lets go of messages, once they have left: each keeps the connections open."""
        self._group.wait_left([work for work, _ in self._under_way], _LAST_S)
        self._under_way.clear()


class Leader:
    """Rank 0's side; every method is called where its scheduler handles events."""

    def __init__(self, group: Group, course: Course) -> None:
        self._sending = _Sending(group)
        self.change(course)

    def change(self, course: Course) -> None:
        """Between two rounds: another course begins."""
        self._course = course
        self._words = Words(course)

    def announce(self, started: Sequence[CommTask], waiting: Sequence[int]) -> None:
        """Tasks start now, in this order, and others are ready (see `Words.started`)."""
        word = self._words.started([task.index for task in started], waiting)
        for first in range(0, len(word), WORD_TASKS):
            indices = word[first : first + WORD_TASKS]
            words = array("q", (len(indices), *indices, *(0,) * (WORD_TASKS - len(indices))))
            # One for each chunk: operations on tensors would take ten times as long.
            self._sending.send(torch.frombuffer(words, dtype=torch.int64))

    def round_ends(self) -> None:
        """A led round is over: what was said has been heard."""
        self._sending.forget()

    def close(self) -> None:
        self._sending.close()


class Follower:
    """The other ranks' side: a thread that hears the order while an iteration goes on.

    It listens only between the first ready chunk of a led round and the last word about it, so
    that an hour of evaluation between two iterations is not a timeout.
    """

    def __init__(
        self,
        group: Group,
        course: Course,
        chunks: int,
        *,
        ordered: Callable[[Sequence[int]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._group = group
        self._course = course
        self._chunks = chunks
        self._ordered = ordered
        self._on_error = on_error
        self._parent = parent(group.rank) if group.rank else 0
        self._sending = _Sending(group)
        self._rounds = threading.Semaphore(0)
        #: led rounds, each counted by one thread
        self._begun = self._ended = 0
        #: chunks of this round
        self._ready = 0
        self._closed = False
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="bytesched-follower", daemon=True)
        self._thread.start()

    def chunk_ready(self) -> None:
        """One more chunk is ready here; with the first of a led round, listening begins."""
        if not self._ready and self._course.is_led:
            self._begun += 1
            self._rounds.release()
        self._ready = (self._ready + 1) % self._chunks

    def change(self, course: Course, chunks: int) -> None:
        """Between two rounds: another course begins, of so many chunks a round."""
        with self._idle:
            # The thread may still pass on the last word of the round.
            has_ended = self._idle.wait_for(
                lambda: self._ended == self._begun or not self._thread.is_alive(),
                self._group.timeout_s,
            )
        if not has_ended:
            raise self._group.error(TimeoutError("timed out"), task=_TASK)
        self._course = course
        self._chunks = chunks

    def close(self) -> None:
        """Ends the thread; a word that it waits for will not come any more."""
        self._closed = True
        self._rounds.release()
        if self._ended != self._begun:
            self._group.abort()
        self._thread.join(5.0)
        self._sending.close()

    def _run(self) -> None:
        try:
            while self._rounds.acquire() and not self._closed:
                self._sending.forget()
                self._follow()
                with self._idle:
                    self._ended += 1
                    self._idle.notify_all()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is waited for
            self._on_error(error)

    def _follow(self) -> None:
        """Hears all words of a round."""
        left = self._chunks
        while left > 0:
            message = torch.empty(1 + WORD_TASKS, dtype=torch.int64, device="cpu")
            self._receive(message)
            self._sending.send(message)
            count, *indices = message.tolist()
            del indices[count:]
            left -= count
            self._course.named(indices)
            self._ordered(indices)

    def _receive(self, message: torch.Tensor) -> None:
        try:
            work = self._group.receive(message, self._parent, _TAG)
        except RuntimeError as error:
            raise self._group.error(error, task=_TASK) from error
        self._group.wait_message(work, task=_TASK)


class Largest:
    """The largest of all ranks' numbers, begun when one round ends and read when the next one does.

    Collective; words of led rounds may be under way beside it.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._under_way: tuple[torch.Tensor, Any] | None = None

    def begin(self, numbers: Sequence[int]) -> None:
        """This rank's numbers, as many on each."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        try:
            work = self._group.backend.allreduce([tensor], options)
        except RuntimeError as error:
            raise self._group.error(error, task=_PLAN) from error
        self._under_way = tensor, work

    def read(self) -> list[int]:
        """The largest ones; none where none were begun."""
        if self._under_way is None:
            return []
        (tensor, work), self._under_way = self._under_way, None
        self._group.wait(work, task=_PLAN)
        return [int(number) for number in tensor.tolist()]

    def close(self) -> None:
        """Lets go of what is under way, once it has ended: it keeps the connections open."""
        if self._under_way is not None:
            (_, work), self._under_way = self._under_way, None
            # The others begin it at the end of the same round, whatever their scripts do.
            self._group.wait_left([work])
