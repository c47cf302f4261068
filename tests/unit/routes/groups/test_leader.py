"""Rank 0's words on their way down the tree: all ranks hear them, in one order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from connected import connected, two_connected
from fake_gloo import CLOSED, TIMEOUT_S, FakeGloo, FakeWork, fake_group, task_of
from together import together

from bytesched.course import Course
from bytesched.errors import InvalidTransition, PeerLost, SchedulerTimeout
from bytesched.plugins.routes.groups.leader import Follower, Largest, Leader
from bytesched.tree import WORD_TASKS


class Wire:
    """Messages between ranks of one process: what is sent is received, in order."""

    def __init__(self, ranks: int) -> None:
        self.ends = [_End(self, rank, ranks) for rank in range(ranks)]
        #: by sender and receiver
        self.messages: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = {
            (one, other): queue.SimpleQueue() for one in range(ranks) for other in range(ranks)
        }


class _Received(FakeWork):
    def __init__(self, source: queue.SimpleQueue[torch.Tensor], into: torch.Tensor) -> None:
        super().__init__()
        self._source, self._into = source, into

    def wait(self, timeout: Any = None) -> None:
        self._into.copy_(self._source.get(timeout=TIMEOUT_S))


class _End(FakeGloo):
    def __init__(self, wire: Wire, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._wire = wire

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeWork:
        work = super().send(tensors, peer, tag)
        self._wire.messages[self.rank(), peer].put(tensors[0].clone())
        work.end()
        return work

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeWork:
        if tag == 1 << 20:
            return super().recv(tensors, peer, tag)
        return _Received(self._wire.messages[peer, self.rank()], tensors[0])


class Following:
    """A follower, and what it has heard."""

    def __init__(self, gloo: Any, chunks: int, **course: Any) -> None:
        self.course = Course(chunks, **{"replay": False, **course})
        self.heard: list[int] = []
        self.errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self.group = fake_group(gloo)
        self.follower = Follower(
            self.group, self.course, chunks, ordered=self._hear, on_error=self.errors.put
        )

    def _hear(self, indices: Sequence[int]) -> None:
        with self._changed:
            self.heard += indices
            self._changed.notify_all()

    def wait(self, count: int) -> list[int]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.heard) >= count, TIMEOUT_S)
            return list(self.heard)


@pytest.mark.parametrize("chunks", [1, 5, WORD_TASKS + 9])
def test_every_rank_hears_all_words_in_their_order(chunks: int) -> None:
    """Of ten ranks, the last one hears them from rank 1; a word may take several messages."""
    wire = Wire(10)
    followers = [Following(end, chunks) for end in wire.ends[1:]]
    leader = Leader(fake_group(wire.ends[0]), course := Course(chunks, replay=False))
    order = [(7 * index) % chunks for index in range(chunks)] if chunks != 1 else [0]
    for number in range(1, 4):
        for following in followers:
            for _ in range(chunks):
                following.follower.chunk_ready()
        # The first is named alone; the rest is ready when it starts, and named at once.
        leader.announce([task_of(order[0])], [])
        if chunks > 1:
            leader.announce([task_of(order[1])], order[2:])
            for index in order[2:]:
                leader.announce([task_of(index)], [])
        for following in followers:
            assert following.wait(number * chunks) == order * number
        leader.round_ends()
        course.round_ends()
        for following in followers:
            following.follower.change(following.course, chunks)
            following.course.round_ends()
    assert {peer for _, _, peer, _ in wire.ends[0].begun} == set(range(1, 9))
    assert {peer for _, _, peer, _ in wire.ends[1].begun} == {9}
    leader.close()
    for following in followers:
        following.follower.close()
        assert following.errors.empty()


def test_it_listens_when_the_first_chunk_of_a_led_round_is_ready() -> None:
    """Until then there may be an hour of evaluation."""
    gloo = FakeGloo(rank=1)
    following = Following(gloo, 2)
    assert not gloo.begun
    following.follower.chunk_ready()
    following.follower.chunk_ready()
    while not gloo.begun:
        pass
    assert [kind for kind, *_ in gloo.begun] == ["recv"]
    following.follower.close()


def test_a_replayed_round_is_not_listened_to() -> None:
    gloo = FakeGloo(rank=1)
    following = Following(gloo, 2)
    following.course.replayed = [1, 0]
    following.follower.chunk_ready()
    following.follower.chunk_ready()
    following.follower.close()
    assert not gloo.begun
    assert following.errors.empty()


def test_what_is_no_word_of_this_round_is_an_error() -> None:
    wire = Wire(2)
    following = Following(wire.ends[1], 2)
    following.follower.chunk_ready()
    wire.messages[0, 1].put(torch.tensor([3, 0, 1, 1, *[0] * (WORD_TASKS - 3)]))
    assert isinstance(following.errors.get(timeout=TIMEOUT_S), InvalidTransition)
    following.follower.close()


def test_a_round_whose_words_do_not_come_holds_a_change_up_for_the_time_limit() -> None:
    gloo = FakeGloo(rank=1)
    following = Following(gloo, 1)
    following.group.timeout_s = 0.01
    following.follower.chunk_ready()
    with pytest.raises(SchedulerTimeout, match="the leader's order"):
        following.follower.change(following.course, 1)
    following.follower.close()


def test_closed_in_the_middle_of_a_round_it_breaks_connections() -> None:
    gloo = FakeGloo(rank=1)
    following = Following(gloo, 1)
    following.follower.chunk_ready()
    following.follower.close()
    assert following.group.is_aborted
    assert "bytesched-follower" not in {thread.name for thread in threading.enumerate()}


def test_closed_between_two_rounds_it_leaves_them_whole() -> None:
    following = Following(FakeGloo(rank=1), 1)
    following.follower.close()
    assert not following.group.is_aborted


def test_the_leader_names_a_message_that_cannot_be_sent() -> None:
    gloo = FakeGloo()
    leader = Leader(fake_group(gloo), Course(1, replay=False))
    gloo.gone.add(1)
    with pytest.raises(PeerLost) as raised:
        leader.announce([task_of()], [])
    assert raised.value.task == "the leader's order"


def test_a_follower_names_a_message_that_cannot_be_received() -> None:
    gloo = FakeGloo(rank=1)
    gloo.gone.add(0)
    following = Following(gloo, 1)
    following.follower.chunk_ready()
    error = following.errors.get(timeout=TIMEOUT_S)
    assert isinstance(error, PeerLost)
    assert error.task == "the leader's order"
    following.follower.close()


def test_a_word_that_was_not_taken_fails_the_round_after_it() -> None:
    gloo = FakeGloo()
    leader = Leader(fake_group(gloo), Course(1, replay=False))
    leader.announce([task_of()], [])
    gloo.works()[0].end(CLOSED)
    with pytest.raises(PeerLost):
        leader.round_ends()


def test_the_largest_numbers_are_read_one_round_after_they_were_said() -> None:
    groups = two_connected()
    largest = [Largest(group) for group in groups]
    assert [one.read() for one in largest] == [[], []]
    largest[0].begin([1, 5, -1])
    largest[1].begin([3, 4, -1])
    assert together(lambda rank: largest[rank].read()) == [[3, 5, -1]] * 2
    assert [one.read() for one in largest] == [[], []]
    largest[0].begin([1])
    largest[1].begin([2])
    together(lambda rank: largest[rank].close())
    assert [one.read() for one in largest] == [[], []]
    for group in groups:
        group.close()


def test_numbers_that_cannot_be_said_or_read_are_errors_of_ours() -> None:
    gloo = FakeGloo()
    largest = Largest(fake_group(gloo))
    largest.begin([1])
    gloo.works()[0].end(CLOSED)
    with pytest.raises(PeerLost) as read:
        largest.read()
    gloo.gone.add(1)
    with pytest.raises(PeerLost) as begun:
        largest.begin([1])
    assert read.value.task == begun.value.task == "the order to replay"


def test_words_go_over_gloo() -> None:
    groups = connected(3)

    def on(rank: int) -> list[int]:
        course = Course(2, replay=False)
        if rank == 0:
            leader = Leader(groups[0], course)
            leader.announce([task_of(1)], [0])
            leader.announce([task_of(0)], [])
            leader.round_ends()
            leader.close()
            return [1, 0]
        heard: queue.SimpleQueue[int] = queue.SimpleQueue()
        errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

        def ordered(indices: Sequence[int]) -> None:
            for index in indices:
                heard.put(index)

        follower = Follower(groups[rank], course, 2, ordered=ordered, on_error=errors.put)
        follower.chunk_ready()
        found = [heard.get(timeout=TIMEOUT_S) for _ in range(2)]
        follower.change(course, 2)
        follower.close()
        assert errors.empty()
        return found

    assert together(on, 3) == [[1, 0]] * 3
    for group in groups:
        group.close()
