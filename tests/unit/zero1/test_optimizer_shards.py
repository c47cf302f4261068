"""State of an optimizer whose entries lie with their owners: asked for, saved, loaded, restored."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laid_out import parameters, plan_of
from looped import TIMEOUT_S

from bytesched.errors import PluginError, SchedulerTimeout
from bytesched.plugins.dependency.progress import Progress
from bytesched.plugins.layout.plan import Ownership
from bytesched.plugins.update.deferred import Deferred
from bytesched.plugins.zero1.optimizer_shards import OptimizerShards, StepTaken
from bytesched.plugins.zero1.rank_calls import unpacked
from bytesched.plugins.zero1.shards import OwnedShards
from bytesched.testing import Loopback

SHAPES = (128,), (64,), (3, 5)
#: of those; both have half of the first
OWNERS = (None, 0, 1)


def adamw(wanted: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    back, *front = reversed(wanted)
    groups: list[dict[str, Any]] = [{"params": front}, {"params": [back], "lr": 0.5}]
    return torch.optim.AdamW(groups, lr=0.1)


def gradient(step: int, parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.full_like(parameter, 0.5 + step) * torch.arange(
        1.0, 1.0 + parameter.numel()
    ).reshape(parameter.shape)


class Rank:
    """One of two, and its own optimizer, which updates what is here of each parameter."""

    def __init__(self, rank: int, loopback: Loopback, ranks: list[Rank]) -> None:
        self.rank = rank
        self.plan = plan_of(parameters(*SHAPES))
        self.plan.cut(1 << 20, Ownership(2, owners=OWNERS, bounds={0: (64, 128)}))
        self.slots = self.plan.slots
        self.owned = OwnedShards(self.plan, rank)
        self._ranks = ranks
        self.waits = 0
        self.steps = 0
        backend: Any = SimpleNamespace(rank=rank, size=2, timeout_s=TIMEOUT_S)
        progress = Progress(loopback.backends[rank], self.slots)
        context: Any = SimpleNamespace(progress=progress, backend=backend)
        self.shards = OptimizerShards(self.plan, context, self.owned, self._ask, self._wait)
        self.optimizer = adamw([slot.parameter for slot in self.slots])
        self.deferred = Deferred(self.optimizer, type(self.optimizer), lambda: None, cross=True)
        for own in self.owned.own.values():
            self.deferred.know(own)

    def _wait(self) -> None:
        self.waits += 1

    def _ask(self, questions: Mapping[int, bytes], task: str) -> Iterator[tuple[int, bytes]]:
        for rank, question in questions.items():
            kind, args = unpacked(question)
            assert kind == "state"
            reply = self._ranks[rank].shards.answer(*args)
            assert reply.is_ready()
            yield rank, reply.make()

    def take(self) -> StepTaken:
        """A step is taken, and nothing is updated."""
        foreign = [slot for slot in self.slots if self.owned.foreign[slot]]
        return self.shards.step(self.deferred, len(self.owned.own), foreign)

    def update(self, taken: StepTaken) -> None:
        """What is here is."""
        taken.begins()
        groups: list[Any] = []
        for group in self.optimizer.param_groups:
            some = []
            for slot in self.slots:
                is_in = any(slot.parameter is parameter for parameter in group["params"])
                if is_in and (own := self.owned.own.get(slot)) is not None:
                    slot.view.copy_(gradient(self.steps, slot.parameter))
                    some.append(own)
            groups.append((group, some))
        self.deferred.update(groups)
        self.steps += 1
        taken.ends(len(self.owned.own))

    def step(self) -> None:
        self.update(self.take())


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    loopback = Loopback(2, timeout_s=TIMEOUT_S)
    found: list[Rank] = []
    found += [Rank(rank, loopback, found) for rank in range(2)]
    for rank in found:
        rank.shards.introduce(rank.deferred)
    yield found
    loopback.close()


def plain(steps: int) -> torch.optim.Optimizer:
    wanted = parameters(*SHAPES)
    optimizer = adamw(wanted)
    for step in range(steps):
        for parameter in wanted:
            parameter.grad = gradient(step, parameter)
        optimizer.step()
    return optimizer


def check_alike(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for key, entry in expected.items():
        assert list(found[key]) == list(entry)
        for name, value in entry.items():
            assert torch.equal(found[key][name], value), (key, name)


def test_a_state_dict_is_that_of_a_plain_optimizer_on_each_rank(ranks: list[Rank]) -> None:
    for steps in (1, 2):
        for rank in ranks:
            rank.step()
        expected = plain(steps).state_dict()
        for rank in ranks:
            found = rank.optimizer.state_dict()
            check_alike(found["state"], expected["state"])
            assert found["param_groups"] == expected["param_groups"]
            # Who waits for what others' steps send has answered all questions for norms before.
            assert rank.waits == steps
    assert [rank.shards.number_of(rank.deferred) for rank in ranks] == [0, 0]


def test_of_a_state_that_is_loaded_each_rank_keeps_what_it_owns(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.optimizer.load_state_dict(plain(3).state_dict())
    first, second, third = (slot.parameter for slot in ranks[0].slots)
    state = ranks[0].optimizer.state
    assert dict.__contains__(state, first)
    assert dict.__getitem__(state, first)["exp_avg"].shape == (64,)
    assert not dict.__contains__(state, third)
    assert state[second]["exp_avg"].shape == (64,)
    for elsewhere in (first, third):
        with pytest.raises(PluginError, match="wholly or partly on other ranks"):
            state[elsewhere]
    for rank in ranks:
        rank.steps = 3
        rank.step()
    expected = plain(4).state_dict()
    check_alike(ranks[1].optimizer.state_dict()["state"], expected["state"])


def test_a_rank_answers_when_it_has_come_as_far_and_no_further(ranks: list[Rank]) -> None:
    zero = ranks[0]
    assert not zero.shards.answer(1, 0, 0).is_ready()
    reply = zero.shards.answer(0, 1, 0)
    assert not reply.is_ready()
    taken = zero.take()
    assert not reply.is_ready()
    zero.update(taken)
    assert reply.is_ready()
    assert not zero.shards.answer(0, 1, 1).is_ready()
    assert not zero.shards.answer(0, 2, 0).is_ready()
    assert sorted(unpacked(reply.make())) == [0, 1]
    then = zero.take()
    # It was taken, and has changed nothing yet.
    assert reply.is_ready()
    assert float(unpacked(reply.make())[1]["step"]) == 1
    then.begins()
    with pytest.raises(PluginError) as raised:
        reply.make()
    assert str(raised.value) == (
        "rank 0 has gone on to step 2, and its optimizer's state was asked for after step 1: call "
        "state_dict() after step(), not between backward() and step()"
    )


def test_a_rank_that_does_not_come_as_far_is_named(ranks: list[Rank]) -> None:
    late = ranks[1].shards.answer(0, 3, 2).late()
    assert isinstance(late, SchedulerTimeout)
    assert "rank 1 has not come to step 3 and 2 calls of load_state_dict() within 100 s" in str(
        late
    )


def test_who_has_loaded_another_state_since_still_answers_with_that_before(
    ranks: list[Rank],
) -> None:
    zero = ranks[0]
    zero.step()
    before, after = zero.shards.answer(0, 1, 0), zero.shards.answer(0, 1, 1)
    assert not after.is_ready()
    zero.optimizer.load_state_dict(plain(3).state_dict())
    assert after.is_ready()
    assert [float(unpacked(r.make())[1]["step"]) for r in (before, after)] == [1, 3]
    taken = zero.take()
    assert float(unpacked(before.make())[1]["step"]) == 1
    zero.update(taken)
    with pytest.raises(PluginError, match="has gone on to step 2"):
        before.make()


def test_an_optimizer_that_one_rank_has_let_go_of_is_refused(ranks: list[Rank]) -> None:
    zero, one = ranks
    for rank in ranks:
        rank.step()
    del one.optimizer
    gc.collect()
    assert not one.deferred.is_alive
    with pytest.raises(PluginError, match="rank 1 has let go of an optimizer whose state was ask"):
        zero.optimizer.state_dict()
    # Those that were let go of before a session knew them count, too.
    one.shards.introduce(one.deferred)
    other = Deferred(plain(0), torch.optim.AdamW, lambda: None, cross=True)
    one.shards.introduce(other)
    assert one.shards.number_of(other) == 2


def test_what_is_restored_is_whole_and_ordinary(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.step()
    for rank in ranks:
        rank.shards.restore()
    expected = plain(1).state_dict()["state"]
    for rank in ranks:
        state = rank.optimizer.state
        check_alike(dict(enumerate(state.values())), dict(enumerate(expected.values())))
        rank.shards.close()
        # Nothing is asked for any more: this rank has all of it.
        waits = rank.waits
        check_alike(rank.optimizer.state_dict()["state"], expected)
        assert rank.waits == waits


def test_what_is_held_has_names_and_ranges(ranks: list[Rank]) -> None:
    for rank in ranks:
        assert rank.shards.held(rank.optimizer) == []
        rank.step()
    found = [
        [
            (held.name, held.start_at, held.stop_at, held.entry["exp_avg"].numel())
            for held in rank.shards.held(rank.optimizer)
        ]
        for rank in ranks
    ]
    assert found == [
        [("p0", 0, 64, 64), ("p1", 0, 64, 64)],
        [("p0", 64, 128, 64), ("p2", 0, 15, 15)],
    ]
    held = ranks[0].shards.held(ranks[0].optimizer)[1]
    # The live state, not a copy.
    assert held.entry is dict.__getitem__(ranks[0].optimizer.state, ranks[0].slots[1].parameter)
