"""Sums for owners between ranks of this process: windows, orders and threads."""

from __future__ import annotations

import random
import threading
from functools import partial

import pytest
import torch
from connected import connected
from together import together
from torch import nn

from bytesched.observe import Observers
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Ownership, Plan
from bytesched.plugins.layout.slots import Slot
from bytesched.plugins.routes.groups.group import Group
from bytesched.plugins.routes.split.exchange import Exchange
from bytesched.task import CommTask
from bytesched.tunable import Setting

SIZES = [700, 40, 40, 3000, 64, 900, 900, 1200]
PARTITION_BYTES = 1024
_LIMIT_S = 60.0


class Rank:
    """One rank: its plan, the exchange of it, and what it has reduced."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.slots = [Slot(f"p{n}", nn.Parameter(torch.zeros(n_))) for n, n_ in enumerate(SIZES)]
        self.plan = Plan(self.slots, partition_bytes=PARTITION_BYTES)
        # Of no optimizer: every rank gets the sums.
        self.plan.cut(PARTITION_BYTES, Ownership(group.size, [None] * len(SIZES)))
        self.errors: list[BaseException] = []
        self._reduced = threading.Semaphore(0)
        self.exchange = Exchange(
            group,
            self.plan,
            Packer(self.plan, group.size, "none"),
            Setting(PARTITION_BYTES, 2 * PARTITION_BYTES),
            reduced=lambda _: self._reduced.release(),
            summed=lambda: None,
            failed=self._fail,
            observers=Observers(),
        )

    def _fail(self, error: BaseException) -> None:
        self.errors.append(error)
        for _ in self.plan.chunks:
            self._reduced.release()

    def round(self, number: int, order: list[int]) -> list[torch.Tensor]:
        """Gradients of a round, whose chunks come in ``order``, reduced."""
        for position, slot in enumerate(self.slots):
            slot.parameter.grad = gradient(self.group.rank, number, position)
            assert slot.take_gradient()
        self.exchange.begin_round()
        for index in order:
            chunk = self.plan.chunks[index]
            while not chunk.notify_ready():
                pass
            self.exchange.submit(chunk)
        for _ in self.plan.chunks:
            assert self._reduced.acquire(timeout=_LIMIT_S), self.exchange.story()
        assert not self.errors, self.errors
        return [slot.view.clone() for slot in self.slots]

    def close(self) -> None:
        self.exchange.close()
        self.group.close()


def _round(found: list[Rank], number: int, orders: list[list[int]], rank: int) -> None:
    found[rank].round(number, orders[rank])


def _close(found: list[Rank], rank: int) -> None:
    found[rank].close()


def gradient(rank: int, number: int, position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 100 * number + position)
    return torch.randn(SIZES[position], generator=generator)


def expected(ranks: int, number: int, position: int) -> torch.Tensor:
    """In the order of the ranks, each divided first."""
    total = gradient(0, number, position) * (1 / ranks)
    for rank in range(1, ranks):
        total = total + gradient(rank, number, position) * (1 / ranks)
    return total


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_rank_has_the_sum_in_the_order_of_the_ranks(ranks: int) -> None:
    """Whatever order chunks come in on each of them, before and after that is agreed on."""
    found = [Rank(group) for group in connected(ranks)]
    count = len(found[0].plan.chunks)

    def a_round(number: int, rank: int) -> list[torch.Tensor]:
        order = list(range(count))
        random.Random(7 * number + rank).shuffle(order)
        return found[rank].round(number, order)

    for number in range(4):
        reduced = together(partial(a_round, number), ranks)
        for views in reduced:
            for position, view in enumerate(views):
                assert torch.equal(view, expected(ranks, number, position))
    together(partial(_close, found), ranks)


def test_gradients_are_sent_in_the_order_in_which_rank_0_has_had_them() -> None:
    found = [Rank(group) for group in connected(2)]
    order = list(range(len(found[0].plan.chunks)))
    orders = [order[1:] + order[:1], order]
    for number in range(3):
        together(partial(_round, found, number, orders), 2)
    for rank in found:
        assert [chunk.index for chunk in rank.exchange.routes.order] == orders[0]
    together(partial(_close, found), 2)


def test_a_rank_begins_a_round_alone() -> None:
    """As the order of rank 0 is told, too: backward waits for no other rank."""
    found = [Rank(group) for group in connected(2)]
    order = list(range(len(found[0].plan.chunks)))
    together(partial(_round, found, 0, [order] * 2), 2)
    for alone in reversed(range(2)):
        together(lambda _: found[alone].exchange.begin_round(), 1)  # noqa: B023 - ends here
        assert not found[alone].errors
    together(partial(_close, found), 2)


def test_an_order_that_cannot_come_holds_no_backward_up() -> None:
    """Its error is reported, long before the time limit of the group."""
    found = [Rank(group) for group in connected(2)]
    order = list(range(len(found[0].plan.chunks)))
    together(partial(_round, found, 0, [order] * 2), 2)
    follower = found[1]
    follower.exchange.begin_round()
    found[0].group.abort()
    together(lambda _: follower.exchange._learned.end(), 1)
    assert follower._reduced.acquire(timeout=_LIMIT_S)
    assert follower.errors
    together(partial(_close, found), 2)


def test_threads_do_not_depend_on_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine a slow message looks stuck, and a thread is added for it.
    monkeypatch.setattr("bytesched.plugins.routes.groups.waiters._STUCK_S", _LIMIT_S)
    counts = []
    for ranks in (2, 5):
        groups = connected(ranks)
        before = threading.active_count()
        found = [Rank(group) for group in groups]
        order = list(range(len(found[0].plan.chunks)))
        together(partial(_round, found, 0, [order] * ranks), ranks)
        counts.append((threading.active_count() - before) / ranks)
        together(partial(_close, found), ranks)
    assert counts[0] == counts[1]


def test_what_is_received_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all that the other ranks will send."""
    monkeypatch.setattr("bytesched.plugins.routes.split.sums._AHEAD_BYTES", 1)
    found = [Rank(group) for group in connected(3)]
    most = [0] * 3

    def a_round(rank: int) -> None:
        sums = found[rank].exchange._sums
        receive_ahead = sums._receive_ahead

        def look() -> None:
            receive_ahead()
            most[rank] = max(most[rank], len(sums._receiving))

        sums._receive_ahead = look  # type: ignore[method-assign]
        found[rank].round(0, list(range(len(found[rank].plan.chunks))))

    together(a_round, 3)
    owned = min(len(rank.exchange.routes.owned) for rank in found)
    largest = max(chunk.nbytes for chunk in found[0].plan.chunks)
    smallest = min(chunk.nbytes for chunk in found[0].plan.chunks)
    assert max(most) <= 4 * largest / smallest + 1
    assert max(most) < owned
    together(partial(_close, found), 3)


def test_a_chunk_has_the_hops_of_its_route() -> None:
    found = [Rank(group) for group in connected(3)]
    for rank in found:
        for chunk in rank.plan.chunks:
            is_mine = rank.plan.owners[chunk.index] == rank.group.rank
            assert len(chunk.followers) == (2 if is_mine else 0), CommTask.__repr__(chunk)
    together(partial(_close, found), 3)


def test_a_close_in_mid_round_is_no_fault_of_a_peer() -> None:
    """Whoever waits for gradients may see connections break before it knows of the close."""
    for _ in range(10):
        found = [Rank(group) for group in connected(2)]
        leaver = found[0]
        for position, slot in enumerate(leaver.slots):
            slot.parameter.grad = gradient(0, 0, position)
            assert slot.take_gradient()
        leaver.exchange.begin_round()
        for chunk in leaver.exchange.routes.owned:
            while not chunk.notify_ready():
                pass
            leaver.exchange.submit(chunk)
        waits = leaver.exchange.messages
        while not waits._awaited:
            pass
        leaver.close()
        assert not leaver.errors
        found[1].close()
