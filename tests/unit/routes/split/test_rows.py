"""Rows of chunks: which chunks they have, and their sums and spreads by collectives of Gloo."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import pytest
import torch
from connected import connected
from together import together
from torch import nn

from bytesched.observe import Observers
from bytesched.plugins.c10d.splitter import ExchangeSplitter
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Plan
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.routes.groups.group import Group
from bytesched.plugins.routes.split.collectives import RowExchange
from bytesched.plugins.routes.split.rows import RowMemory, rows_of
from bytesched.plugins.routes.streams import Streams
from bytesched.task import CommTask
from bytesched.tunable import Setting

SIZES = [700, 40, 40, 3000, 64, 900, 900, 1200]
PARTITION_BYTES = 1024
_LIMIT_S = 60.0


def _unused(*_: Any) -> Any:
    raise AssertionError


def cut(ranks: int) -> tuple[list[Slot], Plan, Packer]:
    slots = [Slot(f"p{n}", nn.Parameter(torch.zeros(size))) for n, size in enumerate(SIZES)]
    plan = Plan(slots, partition_bytes=PARTITION_BYTES, find_unused=True)
    ExchangeSplitter(ranks, _unused, _unused).cut(plan, PARTITION_BYTES)
    packer = Packer(plan, ranks, "none")
    return slots, plan, packer


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_chunk_is_once_in_a_row_at_the_place_of_its_owner(ranks: int) -> None:
    _, plan, packer = cut(ranks)
    rows = rows_of(plan, packer, ranks)
    found = [chunk for row in rows for chunk in row.present()]
    assert sorted(chunk.index for chunk in found) == list(range(len(plan.chunks)))
    for number, row in enumerate(rows):
        assert row.number == number
        assert len(row.chunks) == ranks
        for owner, chunk in enumerate(row.chunks):
            if chunk is not None:
                assert plan.owners[chunk.index] == owner
                assert row.length >= plan.buffers[chunk.index].numel()
                assert row.is_shared == (chunk.index in plan.shared)
        assert len({plan.buffers[chunk.index].dtype for chunk in row.present()}) == 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_come_as_backward_completes_them(ranks: int) -> None:
    _, plan, packer = cut(ranks)
    last = [max(map(plan.computed, row.present())) for row in rows_of(plan, packer, ranks)]
    assert last == sorted(last)


class Rank:
    """One rank: its plan, the exchange of it, and what it has reduced."""

    def __init__(self, data: Group, control: Group) -> None:
        self.slots, self.plan, packer = cut(data.size)
        self.rank = data.rank
        self.errors: list[BaseException] = []
        self._reduced = threading.Semaphore(0)
        self.exchange = RowExchange(
            data,
            control,
            self.plan,
            packer,
            Setting(PARTITION_BYTES, 2 * PARTITION_BYTES),
            Streams(),
            reduced=self._count,
            summed=lambda: None,
            failed=self._fail,
            observers=Observers(),
        )

    def _count(self, chunk: CommTask) -> None:
        self._reduced.release()

    def _fail(self, error: BaseException) -> None:
        self.errors.append(error)
        for _ in self.plan.chunks:
            self._reduced.release()

    def round(self, number: int) -> list[torch.Tensor]:
        """Gradients of a round, whose chunks come in an order of this rank alone."""
        for position, slot in enumerate(self.slots):
            slot.give(gradient(self.rank, position, number))
        chunks = list(self.plan.chunks)
        random.Random(10 * number + self.rank).shuffle(chunks)
        self.exchange.begin_round()
        for chunk in chunks:
            for _ in chunk.members:
                chunk.notify_ready()
            self.exchange.submit(chunk)
        for _ in chunks:
            assert self._reduced.acquire(timeout=_LIMIT_S), self.exchange.story()
        assert not self.errors
        assert self.exchange.is_summed
        return [slot.view.clone() for slot in self.slots]


def _round(made: list[Rank], number: int, rank: int) -> list[torch.Tensor]:
    return made[rank].round(number)


def gradient(rank: int, position: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * number + 100 * rank + position)
    return torch.randn(SIZES[position], generator=generator)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_has_the_same_sums(ranks: int) -> None:
    data, control = connected(ranks), connected(ranks)
    made = together(lambda rank: Rank(data[rank], control[rank]), ranks)
    # More than are led before an order is repeated.
    for number in range(12):
        found = together(partial(_round, made, number), ranks)
        for position in range(len(SIZES)):
            parts = [gradient(rank, position, number) * (1 / ranks) for rank in range(ranks)]
            total = sum(parts[1:], parts[0])
            for views in found:
                assert torch.equal(views[position], found[0][position])
                if ranks < 3:
                    assert torch.equal(views[position], total)
                torch.testing.assert_close(views[position], total)
    together(lambda rank: made[rank].exchange.close(), ranks)


def test_memory_serves_rows_of_any_length() -> None:
    memory, like = RowMemory(), torch.zeros(1)
    for length in (5, 3, 8, 2):
        row, part = memory.take(like, length, 4), memory.take(like, length)
        assert (row.numel(), part.numel()) == (4 * length, length)
        longest = row.untyped_storage().nbytes(), part.untyped_storage().nbytes()
        memory.give([part, row])
    assert longest == (4 * 8 * like.itemsize, 8 * like.itemsize)
    one, other = memory.take(like, 2), memory.take(like, 2)
    assert one.data_ptr() != other.data_ptr()
