"""Two ranks in one process, whose all-reduces go in two halves: what goes when, and what is asked.

That their sums and answers are right is proven on ranks of their own, by many scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bytesched.errors import PeerLost
from bytesched.observe import Observers
from bytesched.plugins.figures.meter import Meter
from bytesched.plugins.planned.buckets import Bucket, Member
from bytesched.plugins.planned.cutting import Cut
from bytesched.plugins.planned.halves import Halves
from bytesched.plugins.planned.questions import answered

SIZES = (5, 3, 4, 2)
#: by gradient; the last one goes whole
OWNERS = (0, 1, 0, None)


class Work:
    """An operation, which ends when it is let."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.is_completed = self.future.done
        self.get_future = lambda: self.future


class Two:
    """Two ranks, and what they have begun: each operation is a pair, which ends on both."""

    def __init__(self) -> None:
        self.begun: tuple[list[Any], list[Any]] = [], []
        self.let_count = 0
        self.is_broken = False
        self.ranks = [Rank(self, 0), Rank(self, 1)]

    def let(self, count: int) -> None:
        """So many more end, in their order."""
        for _ in range(count):
            one, other = (begun[self.let_count] for begun in self.begun)
            self.let_count += 1
            assert one[0] == other[0]
            if not self.is_broken:
                self._move(one, other)
            for *_, work in (one, other):
                if self.is_broken:
                    work.future.set_exception(RuntimeError("broken"))
                else:
                    work.future.set_result(None)

    @staticmethod
    def _move(one: Any, other: Any) -> None:
        kind, into, sent, _ = one
        _, into_there, sent_there, _ = other
        assert into.numel() == sent_there.numel()
        assert into_there.numel() == sent.numel()
        if kind == "sum":
            into.add_(into_there)
            into_there.copy_(into)
        else:
            into.copy_(sent_there)
            into_there.copy_(sent)

    def finish(self) -> None:
        while self.let_count < len(self.begun[0]):
            self.let(1)

    def backward(self) -> None:
        for rank in self.ranks:
            rank.backward()

    def round(self, question: Callable[[Rank], Any]) -> None:
        """One that is asked about, and has landed."""
        self.backward()
        for rank in self.ranks:
            question(rank)
        self.finish()
        for rank in self.ranks:
            rank.land()

    @property
    def sums(self) -> list[Tensor]:
        one, other = (rank.local for rank in self.ranks)
        return [mine + theirs for mine, theirs in zip(one, other, strict=True)]


class EndWire:
    """See `bytesched.plugins.planned.wire.Wire`."""

    size = 2
    timeout_s = 1.0

    def __init__(self, two: Two, rank: int) -> None:
        self.rank = rank
        self._two = two

    def _begin(self, kind: str, into: Tensor, sent: Tensor) -> Work:
        work = Work()
        self._two.begun[self.rank].append((kind, into, sent, work))
        return work

    def start(self, tensor: Tensor, key: str = "") -> Work:
        return self._begin("sum", tensor, tensor)

    def exchange(self, into: Tensor, sent: Tensor) -> Work:
        return self._begin("exchange", into, sent)

    def wait(self, work: Work, task: str) -> None:
        while not work.future.done():
            self._two.let(1)
        try:
            work.future.wait()
        except RuntimeError as error:
            raise PeerLost(str(error), task=task) from error


class Rank:
    """Four gradients in two buckets."""

    def __init__(self, two: Two, rank: int) -> None:
        wire: Any = EndWire(two, rank)
        self.halves = Halves(wire, Meter(Observers(), len(SIZES)), Observers())
        torch.manual_seed(rank)
        self.local = [torch.randn(size) for size in SIZES]
        self.buckets = [self._bucket(0), self._bucket(2)]
        self.members = [member for bucket in self.buckets for member in bucket.members]

    def _bucket(self, first: int) -> Bucket:
        sizes, owners = SIZES[first : first + 2], OWNERS[first : first + 2]
        buffer = torch.zeros(sum(sizes))

        def cut(parameters: object, starts: Sequence[int], memory: Tensor) -> list[Cut]:
            return list(map(Cut, [*starts[1:], memory.numel()], owners))

        return Bucket(
            *(self, buffer, [nn.Parameter(torch.zeros(n)) for n in sizes], buffer.split(sizes), {}),
            holds_gradients=False,
            cut=cut,
            first=first,
        )

    @property
    def grads(self) -> list[Any]:
        return [member.parameter.grad for member in self.members]

    def backward(self) -> None:
        self.halves.round_begins()
        for member, local in zip(self.members, self.local, strict=True):
            member.view.copy_(local)
        for bucket in self.buckets:
            bucket.is_under_way = True
            self.halves.start(bucket.chunks)
        self.halves.all_started()
        for member in self.members:
            member.parameter.grad = torch.full_like(member.view, 7.0)
            member.hand_out(member.parameter.grad)

    def land(self) -> None:
        for bucket in self.buckets:
            bucket.hand_back()

    def ask(self, func: Callable[..., Any], *args: Any) -> Any:
        return answered(func, args, {}, self.halves.foreseen.ask)

    def norms(self) -> Any:
        return self.ask(torch._foreach_norm, self.grads)

    def settle(self, member: Member) -> None:
        raise AssertionError("nobody waits here for whole gradients")

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        raise AssertionError("nobody asks by itself here")


@pytest.fixture
def two() -> Two:
    return Two()


def test_one_chunk_of_each_owner_goes_with_one_of_the_other(two: Two) -> None:
    two.backward()
    # The third has no partner; the fourth goes whole.
    kinds = [(kind, into.numel(), sent.numel()) for kind, into, sent, _ in two.begun[0]]
    assert kinds == [("exchange", 5, 3), ("sum", 2, 2), ("exchange", 4, 0)]
    two.let(3)
    told, *back = two.begun[0][3:]
    assert told[0] == "sum"
    # What was computed last comes first.
    assert [(into.numel(), sent.numel()) for _, into, sent, _ in back] == [(3, 4), (0, 5)]


def test_nothing_goes_back_before_all_is_summed(two: Two) -> None:
    two.backward()
    two.let(2)
    assert len(two.begun[0]) == 3
    halves = two.ranks[0].halves
    halves.wait_for_sums()
    assert len(two.begun[0]) == 6


def test_a_norm_that_was_asked_before_needs_no_gradient(two: Two) -> None:
    two.round(Rank.norms)
    two.backward()
    found = two.ranks[0].norms()
    # Nothing has come back by then, nor has the other rank asked.
    assert not any(work.future.done() for *_, work in two.begun[0][-2:])
    for one, other in zip(found, torch._foreach_norm(two.sums), strict=True):
        assert torch.equal(one, other)
        assert one.dtype is other.dtype
    assert torch.equal(two.ranks[0].norms()[0], found[0])


def test_after_a_step_has_taken_it_a_gradient_is_not_changed_here(two: Two) -> None:
    two.round(Rank.norms)
    two.backward()
    rank = two.ranks[0]
    rank.members[0].taken = True
    assert rank.ask(torch._foreach_mul_, rank.grads, 2.0) is NotImplemented
    assert rank.norms() is NotImplemented
    assert rank.ask(torch._foreach_mul_, rank.grads[1:], 2.0) is None
    two.finish()
    for one in two.ranks:
        one.land()
    two.backward()
    assert rank.norms() is not NotImplemented, "in another round"


def test_a_question_that_fails_on_other_gradients_is_not_answered(two: Two) -> None:
    def question(rank: Rank) -> Any:
        return rank.ask(torch._foreach_norm, rank.grads, "nonsense")

    two.round(question)
    two.backward()
    two.ranks[0].halves.wait_for_sums()
    assert question(two.ranks[0]) is NotImplemented


def test_whoever_waits_is_told_of_an_error(two: Two) -> None:
    two.backward()
    two.let(1)
    two.is_broken = True
    two.let(1)
    for rank in two.ranks:
        for wait in (rank.halves.wait_for_sums, rank.norms):
            with pytest.raises(PeerLost, match="broken"):
                wait()


def test_nothing_is_kept_of_a_round_that_is_over(two: Two) -> None:
    two.backward()
    two.finish()
    halves = two.ranks[0].halves
    assert len(list(halves.works())) == 1
    assert halves.carried.spans.is_complete
    halves.let_go()
    assert not list(halves.works())
    assert not halves.is_round_whole
