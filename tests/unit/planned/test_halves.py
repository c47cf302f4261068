"""Two ranks in one process, whose all-reduces go in two halves."""

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

SIZES = (5, 3, 4, 2)
#: by gradient; the last one goes whole
OWNERS = (0, 1, 0, None)


class Work:
    """An operation, which ends when it is let."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.is_completed = self.future.done
        self.get_future = lambda: self.future


class Ends:
    """What two ranks have begun: each operation is a pair, which ends on both or on none."""

    def __init__(self) -> None:
        self.begun: tuple[list[Any], list[Any]] = [], []
        self.let_count = 0
        self.error: BaseException | None = None

    def let(self, count: int) -> None:
        """So many more end, in their order."""
        for _ in range(count):
            one, other = (begun[self.let_count] for begun in self.begun)
            self.let_count += 1
            assert one[0] == other[0]
            if self.error is None:
                self._move(one, other)
            for *_, work in (one, other):
                if self.error is None:
                    work.future.set_result(None)
                else:
                    work.future.set_exception(RuntimeError("broken"))

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


class EndWire:
    """See `bytesched.plugins.planned.wire.Wire`."""

    size = 2
    timeout_s = 1.0

    def __init__(self, ends: Ends, rank: int) -> None:
        self.rank = rank
        self._ends = ends

    def _begin(self, kind: str, into: Tensor, sent: Tensor) -> Work:
        work = Work()
        self._ends.begun[self.rank].append((kind, into, sent, work))
        return work

    def start(self, tensor: Tensor, key: str = "") -> Work:
        return self._begin("sum", tensor, tensor)

    def exchange(self, into: Tensor, sent: Tensor) -> Work:
        return self._begin("exchange", into, sent)

    def wait(self, work: Work, task: str) -> None:
        while not work.future.done():
            self._ends.let(1)
        try:
            work.future.wait()
        except RuntimeError as error:
            raise PeerLost(str(error), task=task) from error


class Rank:
    """Four gradients in two buckets."""

    def __init__(self, ends: Ends, rank: int) -> None:
        wire: Any = EndWire(ends, rank)
        self.halves = Halves(wire, Meter(Observers(), len(SIZES)), Observers())
        torch.manual_seed(rank)
        self.parameters = [nn.Parameter(torch.zeros(size)) for size in SIZES]
        self.local = [torch.randn(size) for size in SIZES]
        self.buckets = [self._bucket(range(2)), self._bucket(range(2, 4))]

    def _bucket(self, indices: range) -> Bucket:
        buffer = torch.zeros(sum(SIZES[index] for index in indices))
        views = buffer.split([SIZES[index] for index in indices])

        def cut(parameters: object, starts: Sequence[int], memory: Tensor) -> list[Cut]:
            stops = [*starts[1:], memory.numel()]
            return [Cut(stop, OWNERS[at]) for stop, at in zip(stops, indices, strict=True)]

        return Bucket(
            *(self, buffer, [self.parameters[index] for index in indices], list(views), {}),
            holds_gradients=False,
            cut=cut,
            first=indices.start,
        )

    @property
    def members(self) -> list[Member]:
        return [member for bucket in self.buckets for member in bucket.members]

    @property
    def grads(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def backward(self) -> None:
        self.halves.round_begins()
        for bucket in self.buckets:
            for member, local in zip(bucket.members, self.of(bucket), strict=True):
                member.view.copy_(local)
            bucket.is_under_way = True
            self.halves.start(bucket.chunks)
        self.halves.all_started()
        for member in self.members:
            member.parameter.grad = torch.full_like(member.view, 7.0)
            member.hand_out(member.parameter.grad)

    def of(self, bucket: Bucket) -> list[Tensor]:
        return self.local[:2] if bucket is self.buckets[0] else self.local[2:]

    def land(self) -> list[Tensor]:
        for bucket in self.buckets:
            bucket.hand_back()
        return self.grads

    def settle(self, member: Member) -> None:
        raise AssertionError("nobody waits here for whole gradients")

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.halves.questions(func, args, kwargs)


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def ranks(ends: Ends) -> list[Rank]:
    return [Rank(ends, 0), Rank(ends, 1)]


def backward(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.backward()


def sums(ranks: Sequence[Rank]) -> list[Tensor]:
    return [one + other for one, other in zip(ranks[0].local, ranks[1].local, strict=True)]


def ask(rank: Rank, func: Callable[..., Any], *args: Any) -> Any:
    return rank.halves.questions(func, args, {})


def once(ends: Ends, ranks: Sequence[Rank], question: Callable[[Rank], Any]) -> None:
    """A round that is asked about, and has landed."""
    backward(ranks)
    for rank in ranks:
        question(rank)
    ends.finish()
    for rank in ranks:
        rank.land()


def norms(rank: Rank) -> Any:
    return ask(rank, torch._foreach_norm, rank.grads)


def test_both_ranks_have_all_sums(ends: Ends, ranks: list[Rank]) -> None:
    for _ in range(3):
        backward(ranks)
        ends.finish()
        for rank in ranks:
            for found, expected in zip(rank.land(), sums(ranks), strict=True):
                assert torch.equal(found, expected)


def test_one_chunk_of_each_owner_goes_with_one_of_the_other(ends: Ends, ranks: list[Rank]) -> None:
    backward(ranks)
    # The third has no partner; the fourth goes whole.
    kinds = [(kind, into.numel(), sent.numel()) for kind, into, sent, _ in ends.begun[0]]
    assert kinds == [("exchange", 5, 3), ("sum", 2, 2), ("exchange", 4, 0)]
    ends.let(3)
    told, *back = ends.begun[0][3:]
    assert told[0] == "sum"
    # What was computed last comes first.
    assert [(into.numel(), sent.numel()) for _, into, sent, _ in back] == [(3, 4), (0, 5)]


def test_nothing_goes_back_before_all_is_summed(ends: Ends, ranks: list[Rank]) -> None:
    backward(ranks)
    ends.let(2)
    assert len(ends.begun[0]) == 3
    assert "1 to be summed" in repr(ranks[0].halves)
    ranks[0].halves.wait_for_sums()
    assert "handed on" in repr(ranks[0].halves)


def test_a_norm_that_was_asked_before_needs_no_gradient(ends: Ends, ranks: list[Rank]) -> None:
    once(ends, ranks, norms)
    backward(ranks)
    found = norms(ranks[0])
    # Nothing has come back by then, nor has the other rank asked.
    assert not any(work.future.done() for *_, work in ends.begun[0][-2:])
    for one, other in zip(found, torch._foreach_norm(sums(ranks)), strict=True):
        assert torch.equal(one, other)
        assert one.dtype is other.dtype
    again = norms(ranks[0])
    assert torch.equal(again[0], found[0])


@pytest.mark.parametrize("first", [True, False], ids=["never asked", "asked otherwise"])
def test_what_was_not_foreseen_waits(ends: Ends, ranks: list[Rank], first: bool) -> None:
    if not first:
        once(ends, ranks, lambda rank: ask(rank, torch._foreach_norm, rank.grads, 1.0))
    backward(ranks)
    assert norms(ranks[0]) is NotImplemented


def test_no_rank_answers_where_one_has_asked_something_else(ends: Ends, ranks: list[Rank]) -> None:
    def question(rank: Rank) -> None:
        ask(rank, torch._foreach_norm, rank.grads, 2.0 if rank is ranks[0] else 1.0)

    once(ends, ranks, question)
    backward(ranks)
    for rank in ranks:
        assert ask(rank, torch._foreach_norm, rank.grads, 2.0) is NotImplemented
        assert ask(rank, torch._foreach_norm, rank.grads, 1.0) is NotImplemented


def test_one_tensor_is_asked_about_by_itself(ends: Ends, ranks: list[Rank]) -> None:
    def question(rank: Rank) -> list[Any]:
        return [ask(rank, torch.Tensor.norm, grad) for grad in rank.grads]

    once(ends, ranks, question)
    backward(ranks)
    for found, expected in zip(question(ranks[1]), sums(ranks), strict=True):
        assert torch.equal(found, expected.norm())


def test_what_is_done_to_each_element_is_done_where_it_arrives(
    ends: Ends, ranks: list[Rank]
) -> None:
    backward(ranks)
    for rank in ranks:
        assert ask(rank, torch._foreach_mul_, rank.grads[:2], torch.tensor(0.5)) is None
        assert ask(rank, torch.Tensor.clamp_, rank.grads[0], -0.1, 0.1) is rank.grads[0]
    ends.finish()
    expected = sums(ranks)
    expected[0], expected[1] = (expected[0] * 0.5).clamp(-0.1, 0.1), expected[1] * 0.5
    for rank in ranks:
        for found, one in zip(rank.land(), expected, strict=True):
            assert torch.equal(found, one)


def unscaled(rank: Rank, scale: float) -> tuple[bool, Any]:
    found_inf, inverse = torch.zeros(1), torch.full((1,), 1 / scale)
    func = torch._amp_foreach_non_finite_check_and_unscale_
    if ask(rank, func, rank.grads, found_inf, inverse) is NotImplemented:
        return False, NotImplemented
    return bool(found_inf), norms(rank)


def test_a_norm_of_what_was_scaled_before(ends: Ends, ranks: list[Rank]) -> None:
    # What comes after a change is foreseen when it has come twice.
    for _ in range(3):
        once(ends, ranks, lambda rank: unscaled(rank, 4.0))
    backward(ranks)
    for rank in ranks:
        found_inf, found = unscaled(rank, 4.0)
        assert not found_inf
        expected = [one.clone().mul_(0.25) for one in sums(ranks)]
        for one, other in zip(found, torch._foreach_norm(expected), strict=True):
            assert torch.equal(one, other)
    ends.finish()
    ranks[0].land()
    backward_again = [rank.backward for rank in ranks]
    for again in backward_again:
        again()
    assert unscaled(ranks[0], 8.0) == (False, NotImplemented)


def test_infinity_on_one_rank_is_found_on_both(ends: Ends, ranks: list[Rank]) -> None:
    for _ in range(2):
        once(ends, ranks, lambda rank: unscaled(rank, 4.0))
    ranks[1].local[2][1] = float("inf")
    backward(ranks)
    assert [unscaled(rank, 4.0)[0] for rank in ranks] == [True, True]


def test_after_a_step_has_taken_it_a_gradient_is_not_changed_here(
    ends: Ends, ranks: list[Rank]
) -> None:
    once(ends, ranks, norms)
    backward(ranks)
    ranks[0].members[0].taken = True
    assert ask(ranks[0], torch._foreach_mul_, ranks[0].grads, 2.0) is NotImplemented
    assert norms(ranks[0]) is NotImplemented
    assert ask(ranks[0], torch._foreach_mul_, ranks[0].grads[1:], 2.0) is None


def test_a_question_that_fails_on_other_gradients_is_not_answered(
    ends: Ends, ranks: list[Rank]
) -> None:
    def question(rank: Rank) -> Any:
        return ask(rank, torch._foreach_norm, rank.grads, "nonsense")

    once(ends, ranks, question)
    backward(ranks)
    ranks[0].halves.wait_for_sums()
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        torch._foreach_norm(sums(ranks), "nonsense")  # type: ignore[arg-type]
    assert question(ranks[0]) is NotImplemented


def test_whoever_waits_is_told_of_an_error(ends: Ends, ranks: list[Rank]) -> None:
    backward(ranks)
    ends.let(1)
    ends.error = PeerLost("broken")
    ends.let(1)
    for rank in ranks:
        with pytest.raises(PeerLost, match="broken"):
            rank.halves.wait_for_sums()
        with pytest.raises(PeerLost, match="broken"):
            norms(rank)


def test_nothing_is_kept_of_a_round_that_is_over(ends: Ends, ranks: list[Rank]) -> None:
    backward(ranks)
    ends.finish()
    halves = ranks[0].halves
    assert len(list(halves.works())) == 1
    assert halves.carried.spans.is_complete
    halves.let_go()
    assert not list(halves.works())
    assert not halves.is_round_whole
