"""Gradients that a script reads whole: what owners answer, and what is refused in which words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laid_out import parameters, plan_of
from looped import TIMEOUT_S

from bytesched.errors import BytesschedError, PluginError, SchedulerTimeout
from bytesched.plugins.dependency.progress import Progress
from bytesched.plugins.layout.plan import Ownership
from bytesched.plugins.zero1.full_gradients import FullGradients
from bytesched.plugins.zero1.rank_calls import unpacked
from bytesched.plugins.zero1.shards import OwnedShards
from bytesched.round import GradientState, Memory
from bytesched.testing import Loopback

#: of the first parameter, of the second, and of half of the third each
SUMS = torch.arange(12.0), torch.arange(12.0) + 12, torch.arange(12.0) + 24


class Rank:
    """One of two, which has come to the end of a backward pass; what it does not own is NaN."""

    def __init__(self, rank: int, loopback: Loopback, ranks: list[Rank]) -> None:
        self.plan = plan_of(parameters((12,), (12,), (12,)))
        self.plan.cut(1 << 20, Ownership(2, owners=(0, 1, None), bounds={2: (6, 12)}))
        self.slots = self.plan.slots
        self.rank = rank
        self.owned = OwnedShards(self.plan, rank)
        self._ranks = ranks
        self.asked = 0
        backend: Any = SimpleNamespace(rank=rank, size=2, timeout_s=TIMEOUT_S)
        self.progress = Progress(loopback.backends[rank], self.slots)
        context: Any = SimpleNamespace(progress=self.progress, backend=backend)
        self.gradients = FullGradients(self.plan, context, self.owned, self._ask)
        for slot in self.slots:
            slot.make_lazy(partial(self.gradients.complete, slot))
        self.round()

    def round(self) -> None:
        """The next one, up to the end of backward."""
        for slot in self.slots:
            slot.parameter.grad = None
        self.gradients.check()
        self.gradients.begin_round()
        for slot, total in zip(self.slots, SUMS, strict=True):
            slot.view.copy_(total)
            for share in self.owned.foreign[slot]:
                slot.view[share.start_at : share.stop_at] = torch.nan
            slot.state = GradientState.SUMMED
            slot.parameter.grad = slot.lazy

    def _ask(self, questions: Mapping[int, bytes], task: str) -> Iterator[tuple[int, bytes]]:
        for rank, question in questions.items():
            kind, args = unpacked(question)
            assert kind == "gradients"
            self.asked += 1
            reply = self._ranks[rank].gradients.answer(*args)
            assert reply.is_ready()
            yield rank, reply.make()

    def values(self) -> list[list[float]]:
        """As a script reads them, whole."""
        return [[float(n) for n in slot.lazy.tolist()] for slot in self.slots]


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    loopback = Loopback(2, timeout_s=TIMEOUT_S)
    found: list[Rank] = []
    found += [Rank(rank, loopback, found) for rank in range(2)]
    yield found
    loopback.close()


WHOLE = [total.tolist() for total in SUMS]


def doubled(some: list[torch.Tensor]) -> None:
    torch._foreach_mul_(some, 2)


def added(some: list[torch.Tensor]) -> None:
    torch._foreach_add_(some, 1)


def test_what_is_read_is_whole_on_each_rank_and_asked_for_once(ranks: list[Rank]) -> None:
    for rank in ranks:
        assert rank.values() == WHOLE
        assert rank.values() == WHOLE
        assert rank.asked == 1
        # What nobody else has any part of stays as it is here.
        own = rank.slots[rank.rank]
        assert own.memory is Memory.SHARE
        assert {slot.memory for slot in rank.slots if slot is not own} == {Memory.WHOLE}


def test_nobody_sees_what_the_script_of_another_rank_has_written(ranks: list[Rank]) -> None:
    zero, one = ranks
    zero.slots[0].lazy.mul_(100)
    zero.slots[2].lazy.zero_()
    assert zero.slots[0].view.tolist() == (SUMS[0] * 100).tolist()
    assert one.values() == WHOLE


def test_each_change_is_made_once_whoever_has_made_it(ranks: list[Rank]) -> None:
    """Both scripts do the same, and a step of the owner has made them already."""
    zero, one = ranks
    changes: list[Callable[[list[torch.Tensor]], None]] = [doubled, added]
    zero.gradients.change(zero.slots[0], changes)
    assert zero.slots[0].view.tolist() == (SUMS[0] * 2 + 1).tolist()
    one.slots[0].changes = [*changes]
    one.slots[2].changes = [*changes]
    expected = [(SUMS[0] * 2 + 1).tolist(), WHOLE[1], (SUMS[2] * 2 + 1).tolist()]
    assembled = one.gradients.assembled([one.slots[0], one.slots[2]])
    assert [grad.tolist() for grad in assembled] == [expected[0], expected[2]]
    # That was in other memory.
    assert one.slots[0].memory is Memory.SHARE
    assert one.slots[0].view.isnan().all()
    assert one.values() == expected


def test_a_gradient_that_a_step_has_taken_is_refused_where_only_the_parameter_is(
    ranks: list[Rank],
) -> None:
    zero, one = ranks
    zero.gradients.taken([zero.slots[0]], zero.slots[1].chunks)
    one.gradients.spread([one.slots[0]])
    assert (zero.slots[0].memory, one.slots[0].memory) == (Memory.ALONE, Memory.GONE)
    assert zero.slots[0].lazy.tolist() == WHOLE[0]
    with pytest.raises(PluginError) as raised:
        one.slots[0].lazy.tolist()
    assert str(raised.value) == (
        "p0.grad was read after step() on rank 1, which has only the parameter: with shard=True, "
        "read gradients between backward() and step()"
    )


def test_backward_must_not_add_to_what_a_step_has_taken(ranks: list[Rank]) -> None:
    _, one = ranks
    slot, other = one.slots[0], one.slots[1]
    one.gradients.spread([slot])
    # Of its own parameter it may still be dropped, of another one it may not.
    other.parameter.grad = slot.lazy
    with pytest.raises(PluginError, match=r"adds to p1\.grad, that of p0 in the last step, on"):
        one.gradients.check()
    other.parameter.grad = other.lazy
    one.gradients.check()
    one.gradients.begin_round()
    assert (slot.memory, other.memory) == (Memory.SPOILED, Memory.SHARE)
    one.gradients.refuse_spoiled([other])
    for use in (slot.lazy.tolist, lambda: one.gradients.refuse_spoiled([slot])):
        with pytest.raises(PluginError, match=r"adds to p0\.grad, .*\(seen by rank 1\)"):
            use()
    slot.parameter.grad = None
    one.gradients.refuse_spoiled([slot])


def test_an_owner_that_is_one_round_ahead_answers_with_the_last_one(ranks: list[Rank]) -> None:
    zero, one = ranks
    before = one.gradients.answer(2, [1])
    one.slots[1].view.mul_(5)
    one.gradients.keep([one.slots[1]])
    one.round()
    one.slots[1].view.zero_()
    assert before.is_ready()
    (value,) = unpacked(before.make())
    assert value.tolist() == (SUMS[1] * 5).tolist()
    ahead = zero.gradients.answer(3, [0])
    assert not ahead.is_ready()
    late = ahead.late()
    assert isinstance(late, SchedulerTimeout)
    assert "gradients of round 3 are not there within 100 s, and another rank reads" in str(late)
    one.round()
    with pytest.raises(BytesschedError) as raised:
        before.make()
    assert str(raised.value) == "rank 1 is in round 4, and gradients of round 2 were asked for"


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_step_took_without_waiting_for_a_rank_is_kept_for_it(
    ranks: list[Rank], waits: bool
) -> None:
    zero, _ = ranks
    slot = zero.slots[0]
    zero.gradients.taken([slot], zero.slots[1].chunks if waits else [])
    slot.state = GradientState.APPLIED
    zero.round()
    reply = zero.gradients.answer(2, [0])
    if waits:
        # Every rank has stepped, and asks for it no more.
        with pytest.raises(BytesschedError, match="rank 0 is in round 3"):
            reply.make()
    else:
        assert unpacked(reply.make())[0].tolist() == WHOLE[0]


def test_after_an_end_what_is_not_here_is_refused_and_no_number(ranks: list[Rank]) -> None:
    zero, _ = ranks
    for slot in zero.slots:
        zero.gradients.give_back(slot, in_child=False)
    own, foreign, part = (slot.parameter.grad for slot in zero.slots)
    assert type(own) is torch.Tensor
    assert own.tolist() == WHOLE[0]
    for grad, slot in ((foreign, zero.slots[1]), (part, zero.slots[2])):
        assert slot.view.isnan().all()
        assert grad is not None
        with pytest.raises(PluginError, match=rf"{slot.name}\.grad is on other ranks, which rank"):
            grad.tolist()
