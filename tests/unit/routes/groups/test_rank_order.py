"""Three ranks that come to one order: backward's, then one that is planned, over Gloo."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from together import together
from torch._C._distributed_c10d import HashStore, PrefixStore

from bytesched.course import MEASURED_ROUNDS, PLANNED_AFTER
from bytesched.observe import Observers
from bytesched.plugins.routes.groups.group import Group
from bytesched.plugins.routes.groups.notes import Notes
from bytesched.plugins.routes.groups.rank_order import PlannedOrder
from bytesched.plugins.routes.scheduled import ScheduledCarrier
from bytesched.scheduler import InTurn
from bytesched.task import CommTask
from bytesched.transport import Done
from bytesched.tunable import Setting

RANKS, CHUNKS = 3, 6
CREDIT_BYTES = 16


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
        self._setting = Setting(CREDIT_BYTES, CREDIT_BYTES)
        self.chunks = chunks_of(CHUNKS)
        self._errors: list[BaseException] = []
        self._left = threading.Semaphore(0)
        self.carrier = ScheduledCarrier(
            self.chunks,
            meeting.at(number),
            PlannedOrder(group, self.chunks, self._setting),
            credit_bytes=CREDIT_BYTES,
            reduced=lambda _: self._left.release(),
            failed=self._errors.append,
            observers=Observers(),
            events=InTurn(),
        )

    def round(self, seed: int) -> int:
        """One round, chunks ready in an order of its own; how many messages were begun in it."""
        before = self.group.backend.counted
        for chunk in random.Random(seed).sample(self.chunks, len(self.chunks)):
            self._submit(chunk)
        for _ in self.chunks:
            self._wait()
        return int(self.group.backend.counted - before)

    def _submit(self, chunk: CommTask) -> None:
        chunk.notify_ready()
        self.carrier.submit(chunk)

    def _wait(self) -> None:
        assert self._left.acquire(timeout=250.0), (self._errors, self.carrier.story())

    def change(self, chunks: int, policy: str = "priority") -> None:
        self.chunks[:] = chunks_of(chunks)
        self.carrier.change(replace(self._setting, policy=policy))

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
        limit = timedelta(seconds=100)
        backend = dist.ProcessGroupGloo(PrefixStore("control", store), number, RANKS, limit)
        notes = Notes(PrefixStore("notes", store), number)
        counting = Counting(backend)
        group = Group(counting, store, notes, name="s/control", timeout_s=100.0)
        return Rank(number, group, meeting)

    found = together(connected, RANKS)
    yield found, meeting
    together(lambda number: found[number].close(), RANKS)


def test_all_start_the_same_and_rounds_have_no_message(
    ranks: tuple[list[Rank], Meeting],
) -> None:
    """Whatever becomes ready when; also after another cut. Two of the rounds end with a sum."""
    found, meeting = ranks

    def a_round(turn: int, number: int) -> int:
        return found[number].round(31 * turn + number)

    for chunks in (CHUNKS, 4):
        for issued in meeting.started:
            issued.clear()
        if chunks != CHUNKS:
            together(lambda number: found[number].change(4), RANKS)
        rounds = [together(partial(a_round, turn), RANKS) for turn in range(PLANNED_AFTER + 16)]
        said = [turn for turn, messages in enumerate(rounds) if any(messages)]
        assert said == [MEASURED_ROUNDS - 1, MEASURED_ROUNDS, PLANNED_AFTER + 15]
        assert meeting.started[1] == meeting.started[0] == meeting.started[2]
        assert len(meeting.started[0]) == chunks * len(rounds)
        if chunks == CHUNKS:
            assert meeting.started[0][:chunks] == [*reversed(range(chunks))]
        last = meeting.started[0][-chunks:]
        assert last == meeting.started[0][-2 * chunks : -chunks]


def test_another_policy_has_a_plan_at_once(ranks: tuple[list[Rank], Meeting]) -> None:
    """From what was measured under the one before, fifo among them."""
    found, meeting = ranks
    for policy in ("fifo", "priority"):
        together(
            partial(lambda policy, number: found[number].change(CHUNKS, policy), policy), RANKS
        )
        for turn in range(PLANNED_AFTER):
            together(partial(lambda turn, number: found[number].round(turn), turn), RANKS)
    assert meeting.started[1] == meeting.started[0] == meeting.started[2]
    assert len(meeting.started[0]) == 2 * CHUNKS * PLANNED_AFTER
