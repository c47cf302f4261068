"""Rows of chunks: which chunks they have, and their sums and spreads by collectives of Gloo."""

from __future__ import annotations

import random
import threading
from functools import partial

import pytest
import torch
from connected import connected
from laid_out import parameters, plan_of
from together import together
from torch import nn

from bytesched.observe import Observers
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Ownership, Plan
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.routes.groups.group import Group
from bytesched.plugins.routes.split.rows import Row, RowCounts, RowMemory, hops_of, rows_of
from bytesched.plugins.routes.split.sharded_rows import ShardedRows
from bytesched.plugins.routes.streams import Streams
from bytesched.task import CommTask, TaskState
from bytesched.tunable import Setting

SIZES = [700, 40, 40, 3000, 64, 900, 900, 1200]
PARTITION_BYTES = 1024
_LIMIT_S = 60.0


def cut(ranks: int, *, is_updated: bool = True) -> tuple[list[Slot], Plan, Packer]:
    slots = [Slot(f"p{n}", nn.Parameter(torch.zeros(size))) for n, size in enumerate(SIZES)]
    plan = Plan(slots, partition_bytes=PARTITION_BYTES, find_unused=True)
    owners = [n % ranks if is_updated and n != 2 else None for n in range(len(SIZES))]
    plan.cut(PARTITION_BYTES, Ownership(ranks, owners))
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
        self.slots, self.plan, packer = cut(data.size, is_updated=False)
        self.rank = data.rank
        self.errors: list[BaseException] = []
        self._reduced = threading.Semaphore(0)
        self.exchange = ShardedRows(
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
    for number in range(4):
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


#: by position, of two ranks; nobody alone sums the one in the middle
OWNERS = (0, 1, None, 1, 0)
#: the rows of these, as backward completes them: what is behind, the shared one, and the front
ROWS = (("p4", "p3"), ("p2",), ("p0", "p1"))


def cut_for_two() -> tuple[Plan, list[Row]]:
    plan = plan_of(parameters((6,), (8,), (4,), (8,), (8,)))
    plan.cut(1 << 20, Ownership(2, OWNERS))
    return plan, rows_of(plan, Packer(plan, 2, "none"), 2)


def test_every_row_is_summed_and_what_no_rank_updates_is_spread_then() -> None:
    _, rows = cut_for_two()
    assert [tuple(chunk.name for chunk in row.present()) for row in rows] == list(ROWS)
    sums, (spread,) = hops_of(rows)
    assert [hop.row for hop in sums] == rows
    assert spread.row is rows[1]
    assert [hop.followers for hop in sums] == [(), (spread,), ()]
    assert [hop.index for hop in (*sums, spread)] == [0, 1, 2, 4]
    for hop in sums:
        assert (hop.members, hop.missing) == (tuple(hop.row.present()), len(hop.row.present()))
    assert spread.missing == 1


def test_a_sum_begins_with_the_last_chunk_of_its_row() -> None:
    plan, rows = cut_for_two()
    sums, _ = hops_of(rows)
    counts = RowCounts(rows, sums)
    counts.begin_round()
    begun = [counts.submitted(chunk) for chunk in plan.chunks]
    # p0 to p4: the front row is complete with p1, the one behind with p4.
    assert begun == [None, sums[2], sums[1], None, sums[0]]
    assert [counts.summed() for _ in rows] == [False, False, True]


def test_others_wait_between_the_first_chunk_of_a_round_and_the_last_report() -> None:
    plan, rows = cut_for_two()
    counts = RowCounts(rows, hops_of(rows)[0])
    assert counts.is_idle
    counts.begin_round()
    assert counts.is_idle
    for chunk in plan.chunks:
        for _ in chunk.members:
            chunk.notify_ready()
        counts.submitted(chunk)
        assert not counts.is_idle
    counts.summed()
    assert counts.story() == (
        "  5 of 5 chunks submitted, 2 of 3 rows to be summed, 5 chunks on their way"
    )
    reduced: list[CommTask] = []
    for row in rows:
        assert not counts.is_idle
        counts.report(row, reduced.append)
    assert counts.is_idle
    assert [chunk.name for chunk in reduced] == [name for row in ROWS for name in row]
    # They can have gradients again.
    assert {chunk.state for chunk in plan.chunks} == {TaskState.WAITING}
    counts.begin_round()
    assert counts.story().startswith("  0 of 5 chunks submitted, 3 of 3 rows")


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
