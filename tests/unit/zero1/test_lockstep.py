"""Ranks that take other steps than the rest are named, whichever announcement comes first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from bytesched.errors import BytesschedError, MismatchError, PeerLost
from bytesched.plugins.dependency.progress import Progress
from bytesched.plugins.zero1.lockstep import Lockstep, Place


class Failing:
    """The errors of a rank, as its session keeps them."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class Rank:
    """One rank, whose announcements come to the others when `deliver` is called."""

    def __init__(self, number: int) -> None:
        self.progress = Failing()
        self.announced: list[tuple[Place, bool]] = []
        self.lockstep = Lockstep(
            cast(Progress, self.progress),
            number,
            lambda place, is_last: self.announced.append((place, is_last)),
        )
        self.number = number

    def deliver(self, other: Rank) -> None:
        while self.announced:
            other.lockstep.heard(self.number, *self.announced.pop(0))

    def error(self, kind: type[BytesschedError]) -> str:
        assert isinstance(self.progress.error, kind), self.progress.error
        return str(self.progress.error)


@pytest.fixture
def ranks() -> tuple[Rank, Rank]:
    return Rank(0), Rank(1)


Ranks = tuple[Rank, Rank]
Act = Callable[[Lockstep], Any]


def both(ranks: Ranks, *acts: Act) -> None:
    for rank in ranks:
        for act in acts:
            act(rank.lockstep)


def exchanged(ranks: Ranks) -> None:
    zero, one = ranks
    zero.deliver(one)
    one.deliver(zero)


def test_same_steps_in_any_order_of_optimizers(ranks: Ranks) -> None:
    zero, one = ranks
    for number in range(3):
        both(ranks, Lockstep.begins_round)
        zero.lockstep.takes(0, [0, 1])
        exchanged(ranks)
        zero.lockstep.takes(1, [2])
        one.lockstep.takes(1, [2])
        one.lockstep.takes(0, [1, 0])
        if number % 2:
            both(ranks, lambda lockstep: lockstep.sends([3, 4]))
    both(ranks, Lockstep.ends)
    exchanged(ranks)
    assert zero.progress.error is one.progress.error is None


def test_a_step_without_gradients_is_none(ranks: Ranks) -> None:
    ranks[0].lockstep.takes(0, [])
    both(ranks, Lockstep.begins_round)
    exchanged(ranks)
    assert ranks[0].progress.error is ranks[1].progress.error is None


def test_a_step_is_left_out(ranks: Ranks) -> None:
    zero, one = ranks
    zero.lockstep.takes(0, [0])
    one.lockstep.begins_round()
    one.deliver(zero)
    assert "rank 1 goes on to its next forward or backward pass after 0" in zero.error(
        MismatchError
    )
    with pytest.raises(MismatchError, match="rank 0 has taken 1 calls"):
        zero.lockstep.takes(0, [0])


def test_a_step_comes_after_others_have_left_it_out(ranks: Ranks) -> None:
    zero, one = ranks
    one.lockstep.begins_round()
    one.deliver(zero)
    assert zero.progress.error is None
    with pytest.raises(MismatchError, match="on one of them a step was left out"):
        zero.lockstep.takes(0, [0])


def test_a_step_that_others_left_out_is_noticed_by_them(ranks: Ranks) -> None:
    zero, one = ranks
    zero.lockstep.takes(0, [0])
    zero.lockstep.begins_round()
    zero.deliver(one)
    assert one.progress.error is None
    with pytest.raises(MismatchError, match="on one of them a step was left out"):
        one.lockstep.begins_round()


def test_other_gradients(ranks: Ranks) -> None:
    zero, one = ranks
    zero.lockstep.takes(0, [0, 1])
    one.lockstep.takes(0, [0])
    both(ranks, Lockstep.begins_round)
    exchanged(ranks)
    for rank in ranks:
        assert "a gradient was set to None" in rank.error(MismatchError)


@pytest.mark.parametrize(
    "other", [Lockstep.begins_round, lambda lockstep: lockstep.sends([1])], ids=["round", "others"]
)
def test_gradients_that_one_rank_keeps(ranks: Ranks, other: Act) -> None:
    zero, one = ranks
    zero.lockstep.sends([1, 2])
    other(one.lockstep)
    exchanged(ranks)
    assert "do not keep the same gradients" in zero.error(MismatchError)


@pytest.mark.parametrize("is_late", [False, True])
def test_an_end_before_a_step(ranks: Ranks, is_late: bool) -> None:
    zero, one = ranks
    both(ranks, Lockstep.begins_round)
    if not is_late:
        zero.lockstep.takes(0, [0])
    one.lockstep.ends()
    one.deliver(zero)
    if is_late:
        with pytest.raises(PeerLost):
            zero.lockstep.takes(0, [0])
    assert "rank 1 has ended its training after 0 calls of step() with gradients" in zero.error(
        PeerLost
    )


def test_an_end_before_a_round(ranks: Ranks) -> None:
    zero = ranks[0]
    both(ranks, lambda lockstep: lockstep.takes(0, [0]), Lockstep.begins_round, Lockstep.ends)
    exchanged(ranks)
    assert zero.progress.error is None
    with pytest.raises(PeerLost, match="after 2 rounds, rank 0 is in round 3"):
        zero.lockstep.begins_round()


@pytest.mark.parametrize("is_late", [False, True])
def test_an_end_inside_a_backward_pass(ranks: Ranks, is_late: bool) -> None:
    """Its gradients do not come: whoever has done its own part need not wait for them."""
    zero, one = ranks
    both(ranks, Lockstep.begins_round)
    exchanged(ranks)
    one.lockstep.ends()
    if is_late:
        one.deliver(zero)
        assert zero.progress.error is None
        with pytest.raises(PeerLost):
            zero.lockstep.ends_backward()
    else:
        zero.lockstep.ends_backward()
        one.deliver(zero)
    assert "rank 1 has ended its training inside the backward pass" in zero.error(PeerLost)


def test_all_end_inside_a_backward_pass(ranks: Ranks) -> None:
    both(ranks, Lockstep.begins_round, Lockstep.ends)
    exchanged(ranks)
    assert ranks[0].progress.error is ranks[1].progress.error is None


def test_an_end_after_a_backward_pass(ranks: Ranks) -> None:
    both(ranks, Lockstep.begins_round, Lockstep.ends_backward)
    ranks[1].lockstep.ends()
    exchanged(ranks)
    assert ranks[0].progress.error is None


def test_an_end_is_announced_once(ranks: Ranks) -> None:
    both(ranks, Lockstep.ends, Lockstep.ends)
    assert len(ranks[0].announced) == 1
