"""The order of rank 0 on its way: all ranks have it when the round ends, or an error in time."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial

import pytest
from connected import connected
from fake_gloo import CLOSED, TIMEOUT_S, FakeGloo, fake_group
from together import together

from bytesched.errors import PeerLost, SchedulerTimeout
from bytesched.plugins.routes.groups.group import Group
from bytesched.plugins.routes.groups.messages import Messages
from bytesched.plugins.routes.split.gathers import Gather
from bytesched.plugins.routes.split.learned import LearnedOrder


class Learning:
    """One rank's, and a thread for each receive that it expects."""

    def __init__(self, group: Group) -> None:
        self.errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self.order = LearnedOrder(group, Messages(group), self._expect)

    def _expect(self, gathers: Iterable[Gather]) -> None:
        for gather in gathers:
            thread = threading.Thread(target=self._run, args=(gather,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, gather: Gather) -> None:
        try:
            gather()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.errors.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(TIMEOUT_S)


def test_all_ranks_end_a_round_with_the_order_of_rank_0() -> None:
    groups = connected(3)
    ranks = [Learning(group) for group in groups]

    def on(order: list[int], rank: int) -> list[list[int] | None]:
        learned = ranks[rank].order
        # On the others only their number matters.
        learned.begin(order if rank == 0 else [9, 9, 9])
        return [learned.end(), learned.end()]

    assert [rank.order.end() for rank in ranks] == [None] * 3
    for order in ([2, 0, 1], [0, 1, 2]):
        assert together(partial(on, order), 3) == [[order, None]] * 3
    for rank in ranks:
        rank.order.close()
    for group, rank in zip(groups, ranks, strict=True):
        rank.join()
        assert not rank.errors
        group.close()


def test_rank_0_waits_for_no_other() -> None:
    gloo = FakeGloo(size=3)
    learned = Learning(fake_group(gloo)).order
    learned.begin([1, 0])
    assert [(kind, peer) for kind, _, peer, _ in gloo.begun] == [("send", 1), ("send", 2)]
    assert learned.end() == [1, 0]


def test_where_nothing_comes_the_end_of_the_round_is_an_error() -> None:
    rank = Learning(fake_group(FakeGloo(rank=1), timeout_s=0.01))
    rank.order.begin([0, 1])
    with pytest.raises(SchedulerTimeout, match="rank 0") as raised:
        rank.order.end()
    assert raised.value.task == "the order of gradients"
    assert raised.value.rank == 1


def test_an_order_that_cannot_come_holds_nothing_up() -> None:
    gloo = FakeGloo(rank=1)
    rank = Learning(fake_group(gloo))
    rank.order.begin([0, 1])
    gloo.works()[0].end(CLOSED)
    assert rank.order.end() is None
    rank.join()
    (error,) = rank.errors
    assert isinstance(error, PeerLost)
    assert error.task == "the order of gradients"


@pytest.mark.parametrize("number", [0, 1])
def test_an_order_that_cannot_be_sent_is_an_error_of_ours(number: int) -> None:
    gloo = FakeGloo(rank=number)
    gloo.gone.add(1 - number)
    with pytest.raises(PeerLost) as raised:
        Learning(fake_group(gloo)).order.begin([0])
    assert raised.value.task == "the order of gradients"
