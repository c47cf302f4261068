"""Three ranks that come to one order: led down the tree, then planned and replayed, over Gloo."""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from together import together
from torch._C._distributed_c10d import HashStore, PrefixStore

from bytesched.course import LED_ROUNDS
from bytesched.observe import Observers
from bytesched.plugins.routes.groups.group import Group
from bytesched.plugins.routes.groups.notes import Notes
from bytesched.plugins.routes.groups.rank_order import FollowingOrder, LeadingOrder
from bytesched.plugins.routes.scheduled import ScheduledCarrier
from bytesched.scheduler import InTurn
from bytesched.task import CommTask
from bytesched.transport import Done
from bytesched.tunable import Setting

RANKS, CHUNKS = 3, 6
SETTING = Setting(partition_bytes=16, credit_bytes=16, order="replay")


class Counting:
    """A backend whose messages are counted."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.counted = 0

    def send(self, *arguments: Any) -> Any:
        self.counted += 1
        return self._backend.send(*arguments)

    def allreduce(self, *arguments: Any) -> Any:
        self.counted += 1
        return self._backend.allreduce(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class Meeting:
    """A transport for all ranks: a collective ends when all have started it, in its place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: of each rank, what it has started
        self.started: list[list[int]] = [[] for _ in range(RANKS)]
        self._waiting: list[list[tuple[CommTask, Done]]] = [[] for _ in range(RANKS)]

    def at(self, rank: int) -> _Seat:
        return _Seat(self, rank)

    def start(self, rank: int, task: CommTask, done: Done) -> None:
        with self._lock:
            self.started[rank].append(task.index)
            self._waiting[rank].append((task, done))
            ended = [each.pop(0) for each in self._waiting] if all(self._waiting) else []
        for task, done in ended:
            done(task, None)


class _Seat:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def start(self, task: CommTask, done: Done) -> None:
        self._meeting.start(self._rank, task, done)

    def close(self) -> None:
        pass


class Rank:
    def __init__(self, number: int, group: Group, meeting: Meeting) -> None:
        self.group = group
        self.chunks = chunks_of(CHUNKS)
        self._errors: list[BaseException] = []
        self._left = threading.Semaphore(0)
        ordering = (FollowingOrder if number else LeadingOrder)(group, self.chunks, SETTING)
        self.carrier = ScheduledCarrier(
            self.chunks,
            meeting.at(number),
            ordering,
            credit_bytes=SETTING.credit_bytes,
            reduced=lambda _: self._left.release(),
            failed=self._errors.append,
            observers=Observers(),
            events=InTurn(),
        )

    def round(self, seed: int) -> tuple[str, int]:
        """One round, chunks ready in an order of its own: how it was ordered, messages in it."""
        before, order = self.group.backend.counted, self.carrier.order
        for chunk in random.Random(seed).sample(self.chunks, len(self.chunks)):
            chunk.notify_ready()
            self.carrier.submit(chunk)
        for _ in self.chunks:
            assert self._left.acquire(timeout=30.0), (self._errors, self.carrier.story())
        return order, self.group.backend.counted - before

    def change(self, chunks: int) -> None:
        self.chunks[:] = chunks_of(chunks)
        self.carrier.change(SETTING)

    def close(self) -> None:
        self.carrier.close()
        self.group.close()


def chunks_of(number: int) -> list[CommTask]:
    chunks = []
    for index in range(number):
        chunk = CommTask(f"c{index}", start_at=4 * index, stop_at=4 * index + 4, priority=index)
        chunk.index = index
        chunks.append(chunk)
    return chunks


@pytest.fixture
def ranks() -> Any:
    store, meeting = HashStore(), Meeting()

    def connected(number: int) -> Rank:
        limit = timedelta(seconds=60)
        backend = dist.ProcessGroupGloo(PrefixStore("control", store), number, RANKS, limit)
        notes = Notes(PrefixStore("notes", store), number)
        counting = Counting(backend)
        return Rank(
            number, Group(counting, store, notes, name="s/control", timeout_s=60.0), meeting
        )

    found = together(connected, RANKS)
    yield found, meeting
    together(lambda number: found[number].close(), RANKS)


def test_a_replayed_round_has_no_message(ranks: tuple[list[Rank], Meeting]) -> None:
    """Whatever becomes ready when, all start the same; also after another cut."""
    found, meeting = ranks

    def a_round(turn: int, number: int) -> tuple[str, int]:
        return found[number].round(31 * turn + number)

    for chunks in (CHUNKS, 4):
        for numbered, issued in enumerate(meeting.started):
            issued.clear()
            if chunks != CHUNKS:
                found[numbered].change(chunks)
        rounds = [together(partial(a_round, turn), RANKS) for turn in range(LED_ROUNDS + 2 + 16)]
        led, replayed = rounds[: LED_ROUNDS + 2], rounds[LED_ROUNDS + 2 :]
        assert {order for turn in led for order, _ in turn} == {"leader"}
        # Rank 0 sends at least one word to each of the others; two of the rounds end with a sum.
        assert all(messages >= RANKS - 1 for messages in (turn[0][1] for turn in led))
        assert {order for turn in replayed for order, _ in turn} == {"replay"}
        assert [turn[1] for turn in replayed] == [("replay", 0)] * 15 + [("replay", 1)]
        assert meeting.started[1] == meeting.started[0] == meeting.started[2]
        assert len(meeting.started[0]) == chunks * len(rounds)
        last = meeting.started[0][-chunks:]
        assert last == meeting.started[0][-2 * chunks : -chunks]
