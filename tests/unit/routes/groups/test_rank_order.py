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
    def __init__(self, number: int, group: Group, meeting: Meeting, order: str) -> None:
        self.group = group
        self._setting = Setting(CREDIT_BYTES, CREDIT_BYTES, order=order)
        self.chunks = chunks_of(CHUNKS)
        self._errors: list[BaseException] = []
        self._left = threading.Semaphore(0)
        ordering = (FollowingOrder if number else LeadingOrder)(group, self.chunks, self._setting)
        self.carrier = ScheduledCarrier(
            self.chunks,
            meeting.at(number),
            ordering,
            credit_bytes=CREDIT_BYTES,
            reduced=lambda _: self._left.release(),
            failed=self._errors.append,
            observers=Observers(),
            events=InTurn(),
        )

    def round(self, seed: int) -> tuple[str, int]:
        """One round, chunks ready in an order of its own: how it was ordered, messages in it."""
        before, order = self.group.backend.counted, self.carrier.order
        for chunk in random.Random(seed).sample(self.chunks, len(self.chunks)):
            self._submit(chunk)
        for _ in self.chunks:
            self._wait()
        return order, self.group.backend.counted - before

    def slow_round(self) -> tuple[str, int]:
        """One round in which every chunk finds the link idle."""
        before, order = self.group.backend.counted, self.carrier.order
        for chunk in reversed(self.chunks):
            self._submit(chunk)
            self._wait()
        return order, self.group.backend.counted - before

    def _submit(self, chunk: CommTask) -> None:
        chunk.notify_ready()
        self.carrier.submit(chunk)

    def _wait(self) -> None:
        assert self._left.acquire(timeout=250.0), (self._errors, self.carrier.story())

    def change(self, chunks: int) -> None:
        self.chunks[:] = chunks_of(chunks)
        self.carrier.change(self._setting)

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
def ranks(request: pytest.FixtureRequest) -> Any:
    store, meeting = HashStore(), Meeting()

    def connected(number: int) -> Rank:
        limit = timedelta(seconds=100)
        backend = dist.ProcessGroupGloo(PrefixStore("control", store), number, RANKS, limit)
        notes = Notes(PrefixStore("notes", store), number)
        counting = Counting(backend)
        group = Group(counting, store, notes, name="s/control", timeout_s=100.0)
        return Rank(number, group, meeting, request.param)

    found = together(connected, RANKS)
    yield found, meeting
    together(lambda number: found[number].close(), RANKS)


@pytest.mark.parametrize("ranks", ["replay"], indirect=True)
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


@pytest.mark.parametrize("ranks", ["auto"], indirect=True)
def test_an_order_that_stays_is_repeated_without_messages(
    ranks: tuple[list[Rank], Meeting],
) -> None:
    found, meeting = ranks
    rounds = [
        together(lambda number: found[number].slow_round(), RANKS)
        for _ in range(2 * LED_ROUNDS + 17)
    ]
    led = rounds[:LED_ROUNDS] + rounds[LED_ROUNDS + 16 : -1]
    repeated = [*rounds[LED_ROUNDS : LED_ROUNDS + 16], rounds[-1]]
    assert {order for turn in led for order, _ in turn} == {"leader"}
    assert all(turn[0][1] >= RANKS - 1 for turn in led)
    assert {each for turn in repeated for each in turn} == {("replay", 0)}
    assert meeting.started == [[*reversed(range(CHUNKS))] * len(rounds)] * RANKS


@pytest.mark.parametrize("ranks", ["auto"], indirect=True)
def test_an_order_that_changes_is_led(ranks: tuple[list[Rank], Meeting]) -> None:
    """Chunks become ready in other orders on each rank and in each round."""
    found, meeting = ranks
    for turn in range(40):
        together(partial(lambda turn, number: found[number].round(31 * turn + number), turn), RANKS)
    assert meeting.started[1] == meeting.started[0] == meeting.started[2]
    assert len(meeting.started[0]) == CHUNKS * 40
