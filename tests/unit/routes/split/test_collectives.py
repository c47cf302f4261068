"""The order of both hops of every row, what is counted of a round, and what ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_gloo import CLOSED
from laid_out import parameters, plan_of
from met_gloo import Meeting

from bytesched.errors import PeerLost, SchedulerClosed
from bytesched.observe import Observers
from bytesched.plugins.layout.packing import Packer
from bytesched.plugins.layout.plan import Ownership, Plan
from bytesched.plugins.routes import scheduled
from bytesched.plugins.routes.split.collectives import RowCounts, RowExchange, hops_of
from bytesched.plugins.routes.split.rows import Row, rows_of
from bytesched.plugins.routes.streams import Streams
from bytesched.task import CommTask, TaskState
from bytesched.tunable import Setting

SIZES = (6, 8, 4, 8, 8)
#: by position, of two ranks; nobody alone sums the one in the middle
OWNERS = (0, 1, None, 1, 0)
#: the rows of these, as backward completes them: what is behind, the shared one, and the front
ROWS = (("p4", "p3"), ("p2",), ("p0", "p1"))
#: of the smallest hop: no second one starts beside any
CREDIT_BYTES = 16
TIMEOUT_S = 100.0


def cut() -> tuple[Plan, Packer, list[Row]]:
    plan = plan_of(parameters(*((n,) for n in SIZES)))
    plan.cut(1 << 20, Ownership(2, OWNERS))
    packer = Packer(plan, 2, "none")
    return plan, packer, rows_of(plan, packer, 2)


def gradient(rank: int, position: int, number: int) -> torch.Tensor:
    """Numbers that add up exactly."""
    return torch.arange(SIZES[position]) + 2.0 * (1 + position + 10 * rank + 100 * number)


def make_ready(chunk: CommTask) -> None:
    for _ in chunk.members:
        chunk.notify_ready()


def test_sums_go_first_then_what_all_ranks_sum_then_the_front() -> None:
    plan, _, rows = cut()
    assert [tuple(chunk.name for chunk in row.present()) for row in rows] == list(ROWS)
    sums, spreads = hops_of(rows, plan)
    in_order = sorted([*spreads, *sums], key=lambda hop: hop.priority)
    assert [(hop.is_spread, hop.row.number) for hop in in_order] == [
        *((False, number) for number in (0, 1, 2)),
        *((True, number) for number in (1, 2, 0)),
    ]
    assert [hop.index for hop in (*sums, *spreads)] == list(range(6))
    assert [hop.row for hop in sums] == [hop.row for hop in spreads] == rows
    for hop in sums:
        assert (hop.members, hop.missing) == (tuple(hop.row.present()), len(hop.row.present()))
    assert {hop.missing for hop in spreads} == {1}


def test_a_sum_begins_with_the_last_chunk_of_its_row() -> None:
    plan, _, rows = cut()
    sums, _ = hops_of(rows, plan)
    counts = RowCounts(rows, sums)
    counts.begin_round()
    begun = [counts.submitted(chunk) for chunk in plan.chunks]
    # p0 to p4: the front row is complete with p1, the one behind with p4.
    assert begun == [None, sums[2], sums[1], None, sums[0]]
    assert [counts.summed() for _ in rows] == [False, False, True]


def test_others_wait_between_the_first_chunk_of_a_round_and_the_last_report() -> None:
    plan, _, rows = cut()
    counts = RowCounts(rows, hops_of(rows, plan)[0])
    assert counts.is_idle
    counts.begin_round()
    assert counts.is_idle
    for chunk in plan.chunks:
        make_ready(chunk)
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


class AtOnce:
    """Events that are handled by who puts them (see scheduler.EventThread)."""

    handled = 0

    def put(self, handle: Callable[[Any], None], event: Any) -> None:
        handle(event)
        self.handled += 1

    def close(self) -> None:
        pass

    def join(self, timeout_s: float) -> bool:
        return True


class Rank:
    """One rank's exchange, which sends one hop at a time, and what it tells."""

    def __init__(self, data: Meeting, control: Meeting, rank: int, order: str) -> None:
        self.rank = rank
        self.gloo = data.gloos[rank]
        self.group, self.control = data.groups[rank], control.groups[rank]
        self.plan, packer, self.rows = cut()
        self.told: list[str] = []
        self.errors: list[BaseException] = []
        self._changed = threading.Condition()
        self.exchange = RowExchange(
            self.group,
            self.control,
            self.plan,
            packer,
            Setting(CREDIT_BYTES, CREDIT_BYTES, policy="fifo", order=order),
            Streams(),
            reduced=lambda chunk: self._tell(chunk.name),
            summed=lambda: self._tell("summed"),
            failed=self._fail,
            observers=Observers(),
        )

    def _tell(self, what: str) -> None:
        with self._changed:
            self.told.append(what)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.errors.append(error)
            self._changed.notify_all()

    def begin(self, number: int = 0) -> None:
        # Who reports the end of a round may still be at it, and would handle what is put next.
        assert self.exchange._carrier._scheduler._events.join(TIMEOUT_S)
        for position, slot in enumerate(self.plan.slots):
            slot.give(gradient(self.rank, position, number))
        self.told.clear()
        self.exchange.begin_round()

    def submit(self, *names: str) -> None:
        chunks = {chunk.name: chunk for chunk in self.plan.chunks}
        for name in names:
            make_ready(chunks[name])
            self.exchange.submit(chunks[name])

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT_S), self.exchange.story()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    """Two, in the order that the parameter says."""
    monkeypatch.setattr(scheduled, "EventThread", AtOnce)
    order, before = getattr(request, "param", "auto"), set(threading.enumerate())
    data, control = Meeting(2), Meeting(2)
    made = [Rank(data, control, rank, order) for rank in range(2)]
    yield made
    for one in made:
        one.exchange.close()
        one.exchange.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("ranks", ["auto", "leader", "replay"], indirect=True)
def test_all_ranks_issue_both_hops_of_all_rows_in_one_order(ranks: list[Rank]) -> None:
    """Whatever chunks are there first, and whatever policy and order are set."""
    leader, follower = ranks
    # More than are led before numbers are compared, were this order replayed.
    for number in range(7):
        for one in ranks:
            one.begin(number)
            assert not one.exchange.is_summed
            one.gloo.begun.clear()
        # The leader sends one hop at a time, the first of which ends with the other rank.
        leader.submit("p4", "p3", "p2", "p1", "p0")
        follower.submit("p0", "p1", "p2", "p3", "p4")
        for one in ranks:
            one.wait(lambda: len(one.told) == 6 or bool(one.errors))  # noqa: B023 - ends here
            assert not one.errors
            assert [kind for kind, *_ in one.gloo.begun] == ["sum"] * 3 + ["spread"] * 3
            # All sums, what all ranks sum, the front row, the row behind.
            assert one.told == ["summed", "p2", "p0", "p1", "p4", "p3"]
            assert one.exchange.is_summed
            for position, slot in enumerate(one.plan.slots):
                total = gradient(0, position, number) + gradient(1, position, number)
                assert torch.equal(slot.view, total / 2)
    assert leader.exchange.traffic.chunks == follower.exchange.traffic.chunks == 7 * 6
    for one in ranks:
        one.exchange.close()
        assert not one.group.is_aborted
        assert not one.control.is_aborted


def test_a_hop_that_fails_is_told_once_and_nothing_starts_after_it(ranks: list[Rank]) -> None:
    leader = ranks[0]
    leader.begin()
    leader.submit("p4", "p3", "p2")
    (work,) = leader.gloo.works()
    work.end(CLOSED)
    leader.wait(lambda: bool(leader.errors))
    leader.submit("p1", "p0")
    (error,) = leader.errors
    assert isinstance(error, PeerLost)
    assert error.task == "sum of row 0, p4"
    assert len(leader.gloo.works()) == 1
    assert "fail    sum of row 0, p4" in leader.exchange.story()
    assert not leader.told


@pytest.mark.parametrize("names", [(), ("p4",), ("p4", "p3")], ids=["none", "half a row", "a row"])
def test_a_close_breaks_connections_if_others_wait_for_the_rest_of_a_round(
    ranks: list[Rank], names: tuple[str, ...]
) -> None:
    leader = ranks[0]
    leader.begin()
    leader.submit(*names)
    assert leader.exchange.story().startswith(f"  {len(names)} of 5 chunks submitted, 3 of 3 rows")
    leader.exchange.close()
    assert leader.group.is_aborted is bool(names)
    with pytest.raises(SchedulerClosed, match=r"CommTask p2 ready .* was submitted after close"):
        leader.submit("p2")
    assert not leader.told


def test_a_close_in_mid_round_is_no_error_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduled, "EventThread", AtOnce)
    # Often: a thread that waits for the hop may look before this rank knows that it is closing.
    for _ in range(25):
        leader = Rank(Meeting(2), Meeting(2), 0, "auto")
        leader.begin()
        leader.submit("p4", "p3")
        assert leader.gloo.works()[0].waited_for.wait(TIMEOUT_S)
        leader.exchange.close()
        assert not leader.errors


def test_others_that_wait_are_told_before_the_order_is_closed(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, was_aborted = ranks[0], []
    ordering = leader.exchange._carrier._ordering
    close = ordering.close

    def look() -> None:
        was_aborted.append(leader.group.is_aborted)
        close()

    monkeypatch.setattr(ordering, "close", look)
    leader.begin()
    leader.submit("p4")
    leader.exchange.close()
    assert was_aborted == [True]


def test_it_shows_its_rank_and_leaves_the_search_for_the_dead_to_answers(
    ranks: list[Rank],
) -> None:
    for one in ranks:
        assert repr(one.exchange).startswith(f"<RowExchange rank {one.rank} of 2, ")
        one.gloo.gone.add(1 - one.rank)
        assert one.exchange.lost() is None
        assert one.exchange.order == "rows"
