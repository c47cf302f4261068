"""Phase one at an owner: parts of all ranks, added up in the order of the ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_gloo import CLOSED, TIMEOUT_S, Ends, FakeGloo, FakeWork, fake_group
from laid_out import parameters, plan_of

from bytesched.errors import PeerLost, SchedulerClosed
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.routes.groups.messages import Messages
from bytesched.plugins.routes.split import sums as module
from bytesched.plugins.routes.split.sums import Sums
from bytesched.task import CommTask

SIZES = (40, 24, 64)
RANKS = 4


def part(rank: int, number: int, chunk: CommTask) -> torch.Tensor:
    """What a rank has for a chunk in a round."""
    generator = torch.Generator().manual_seed(1000 * rank + 100 * number + chunk.index)
    return torch.randn(chunk.stop_at - chunk.start_at, generator=generator)


class Owner:
    """One of four ranks, which owns every chunk; what the others send comes when a test says so."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.plan = plan_of(parameters(*((n,) for n in SIZES)))
        self.packer = Packer(self.plan, 1, "none")
        self.number = 0
        self.memory: set[int] = set()
        #: by chunk and rank
        self.works: dict[tuple[int, int], FakeWork] = {}
        self._changed = threading.Condition()
        self.is_late = False
        group = fake_group(FakeGloo(rank, RANKS))
        self.sums = Sums(group, Messages(group), self.packer, self.plan.chunks, self._receive)
        self.ends = Ends()

    def _receive(self, memory: torch.Tensor, rank: int, chunk: CommTask) -> Any:
        with self._changed:
            memory.copy_(part(rank, self.number, chunk))
            self.memory.add(memory.data_ptr())
            work = self.works[chunk.index, rank] = FakeWork()
            if not self.is_late:
                work.end()
            self._changed.notify_all()
            return work

    def begun(self, chunk: CommTask, rank: int) -> FakeWork:
        with self._changed:
            assert self._changed.wait_for(lambda: (chunk.index, rank) in self.works, TIMEOUT_S)
            return self.works[chunk.index, rank]

    def begin(self, number: int) -> None:
        self.number, self.ends = number, Ends()
        self.works.clear()
        for chunk in self.plan.chunks:
            for slice_ in self.plan.slices[chunk.index]:
                if slice_.slot.parameter.grad is None:
                    slice_.slot.parameter.grad = torch.zeros(slice_.slot.view.shape)
                own = part(self.rank, number, chunk)
                at = (
                    slice_.target.storage_offset() - self.plan.buffers[chunk.index].storage_offset()
                )
                n = slice_.stop_at - slice_.start_at
                grad = slice_.slot.parameter.grad
                grad[slice_.start_at : slice_.stop_at] = own[at : at + n]
        for slot in self.plan.slots:
            assert slot.take_gradient()
        self.sums.begin_round()

    def sum(self, chunk: CommTask) -> None:
        self.sums.start(chunk, self.ends.done)

    def check(self, chunk: CommTask) -> None:
        expected = part(0, self.number, chunk)
        for rank in range(1, RANKS):
            expected = expected + part(rank, self.number, chunk)
        assert torch.equal(self.plan.buffers[chunk.index], expected)


@pytest.fixture(params=range(RANKS))
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    made = Owner(request.param)
    yield made
    for work in made.works.values():
        work.end()
    made.sums.close()
    made.sums.close()
    assert "bytesched-sums" not in {thread.name for thread in threading.enumerate()}


def test_it_has_the_bits_of_an_addition_in_the_order_of_the_ranks(owner: Owner) -> None:
    for number in range(3):
        owner.begin(number)
        for chunk in owner.plan.chunks:
            owner.sum(chunk)
        owner.ends.wait(*(chunk.name for chunk in owner.plan.chunks))
        assert not owner.ends.errors
        for chunk in owner.plan.chunks:
            owner.check(chunk)


def test_memory_is_used_again_in_the_next_round(owner: Owner) -> None:
    memory = []
    for number in range(2):
        owner.begin(number)
        for chunk in owner.plan.chunks:
            owner.sum(chunk)
        owner.ends.wait(*(chunk.name for chunk in owner.plan.chunks))
        memory.append(frozenset(owner.memory))
    assert memory[0] == memory[1]


def test_it_waits_for_each_of_the_others(owner: Owner) -> None:
    owner.is_late = True
    owner.begin(0)
    chunk = owner.plan.chunks[0]
    owner.sum(chunk)
    others = [rank for rank in range(RANKS) if rank != owner.rank]
    for rank in others:
        assert not owner.ends.names
        work = owner.begun(chunk, rank)
        assert work.waited_for.wait(TIMEOUT_S)
        work.end()
    owner.ends.wait(chunk.name)
    owner.check(chunk)


def test_a_rank_that_is_gone_fails_the_chunk_that_it_sends(owner: Owner) -> None:
    owner.is_late = True
    owner.begin(0)
    chunk = owner.plan.chunks[0]
    owner.sum(chunk)
    owner.begun(chunk, (owner.rank + 1) % RANKS).end(CLOSED)
    for rank in range(RANKS):
        if rank != owner.rank:
            work = owner.begun(chunk, rank)
            if not work.is_completed():
                work.end()
    owner.ends.wait(chunk.name)
    error = owner.ends.errors[chunk.name]
    assert isinstance(error, PeerLost)
    assert error.task == chunk.name


def test_a_receive_that_cannot_begin_fails_the_first_chunk(owner: Owner) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError(CLOSED)

    owner.sums._receive = refuse
    owner.begin(0)
    chunk = owner.plan.chunks[0]
    owner.sum(chunk)
    owner.ends.wait(chunk.name)
    error = owner.ends.errors[chunk.name]
    assert isinstance(error, PeerLost)
    assert error.task == chunk.name


def test_what_a_close_breaks_was_closed() -> None:
    owner = Owner(0)
    owner.is_late = True
    owner.begin(0)
    chunk = owner.plan.chunks[0]
    owner.sum(chunk)
    work = owner.begun(chunk, 1)
    closing = threading.Thread(target=owner.sums.close)
    closing.start()
    while not owner.sums._closed:
        pass
    work.end(CLOSED)
    closing.join(TIMEOUT_S)
    owner.ends.wait(chunk.name)
    assert isinstance(owner.ends.errors[chunk.name], SchedulerClosed)


def test_chunks_are_received_ahead_as_far_as_there_is_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order in which they are sent: that of the last round, until another one is used."""
    monkeypatch.setattr(module, "_AHEAD_BYTES", 0)
    monkeypatch.setattr(module, "_AHEAD_CHUNKS", 1)
    owner = Owner(1)
    order = list(reversed(owner.plan.chunks))
    owner.sums.use_order(order)
    owner.begin(0)
    owner.begun(order[0], 0)
    owner.sum(order[0])
    owner.ends.wait(order[0].name)
    first = [index for index, rank in owner.works if rank == 0]
    assert len(first) < len(order)
    assert first == [chunk.index for chunk in order[: len(first)]]
    for chunk in order[1:]:
        owner.sum(chunk)
    owner.ends.wait(*(chunk.name for chunk in order))
    assert not owner.ends.errors
    for chunk in order:
        owner.check(chunk)
    owner.sums.close()
