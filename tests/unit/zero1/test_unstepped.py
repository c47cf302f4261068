"""Gradients that no step takes: before they are added to, every rank has what DDP would have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from laid_out import parameters, plan_of
from sharded_ranks import Averaged, Rank, Wire, both
from torch import Tensor, nn
from torch.optim import Optimizer

from bytesched.errors import MismatchError, PeerLost
from bytesched.plugins.layout.plan import Ownership
from bytesched.plugins.routes.split.turns import Sent
from bytesched.plugins.zero1.shards import OwnedShards
from bytesched.plugins.zero1.unstepped import UnsteppedGradients
from bytesched.round import BundleState, GradientState, Memory, Round

#: those of `mlp`, in forward order: no optimizer has the first ones
OUTSIDE = 4
OWNERS = (0, 1, 0, 1, None, 0)


def last_layer(model: nn.Module) -> Optimizer:
    return torch.optim.SGD([*model.parameters()][OUTSIDE:], lr=0.1, momentum=0.9)


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire(OWNERS)
    yield wire
    wire.close()


def copies(parameters: list[Any]) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in parameters]


def gradients_of(rank: Rank) -> int:
    """How many chunks of gradients others were to send it."""
    return sum(sent is Sent.GRADIENTS for sent, _ in rank.carrier.expected)


def test_they_add_up_on_each_rank_as_they_would_in_plain_training(wire: Wire) -> None:
    ranks = both(wire, last_layer)

    def work(number: int) -> list[Tensor]:
        rank = ranks[number]
        rank.train(4)
        found = copies(rank.parameters[:OUTSIDE])
        rank.end()
        return found

    plain = Averaged(last_layer)
    plain.train(4)
    expected = copies([*plain.model.parameters()][:OUTSIDE])
    for rank, found in zip(ranks, wire.run(work), strict=True):
        assert all(map(torch.equal, found, expected))
        assert all(map(torch.equal, rank.parameters, plain.model.parameters()))
        # Of others: the script has read those of the last round only.
        assert rank.carrier.questions == [1 - rank.rank]


def test_what_one_rank_has_done_to_them_stays_its_own(wire: Wire) -> None:
    """Rank 1 scales what it has read, rank 0 what it has not."""
    ranks = both(wire, last_layer)

    def work(number: int) -> list[Tensor]:
        rank = ranks[number]
        rank.train(1)
        rank.backward(1)
        mine = rank.parameters[:OUTSIDE]
        if number:
            copies(mine)
        for parameter in mine:
            parameter.grad.mul_(2.0 + number)
        rank.model(torch.ones(4, 8))
        found = copies(mine)
        rank.session.close(release_parameters=False)
        return found

    plain = Averaged(last_layer)
    plain.train(1)
    plain.backward(1)
    expected = copies([*plain.model.parameters()][:OUTSIDE])
    for number, found in enumerate(wire.run(work)):
        assert all(map(torch.equal, found, [grad * (2.0 + number) for grad in expected]))


def test_they_are_sent_once_before_the_forward_pass_that_follows(wire: Wire) -> None:
    ranks = both(wire, last_layer)

    def work(number: int) -> list[int]:
        rank = ranks[number]
        rank.train(1)
        counts = []
        for step in (1, 2):
            rank.optimizer.zero_grad()
            rank.backward(step)
            rank.optimizer.step()
            counts.append(gradients_of(rank))
            for _ in range(2):
                rank.model(torch.ones(4, 8))
                counts.append(gradients_of(rank))
        rank.end()
        return counts

    for none, once, again, then, twice, last in wire.run(work):
        assert none == 0
        assert once == again == then > 0
        assert twice == last == 2 * once


def test_nothing_is_sent_of_those_that_are_dropped(wire: Wire) -> None:
    ranks = both(wire, last_layer)

    def work(number: int) -> int:
        rank = ranks[number]
        for step in range(3):
            rank.model.zero_grad()
            rank.backward(step)
            rank.optimizer.step()
        rank.model.zero_grad()
        rank.model(torch.ones(4, 8))
        rank.end()
        return gradients_of(rank)

    assert wire.run(work) == [0, 0]


def test_nothing_is_sent_before_the_updates_of_a_step_are_done() -> None:
    """Another rank's forward pass may wait for those, and sends nothing before it."""
    plan = plan_of(parameters((8,), (6,)))
    plan.cut(1 << 20, Ownership(2, owners=(0, 1)))
    for slot in plan.slots:
        slot.make_lazy(lambda: None)
        slot.parameter.grad = slot.lazy
        slot.state, slot.memory = GradientState.SUMMED, Memory.SHARE
    bundle, log = plan.bundles[0], Mock()
    bundle.state = BundleState.ARMED

    def wait(done: Callable[[], bool], what: str) -> None:
        log.wait(what)
        if what == "updates of a step":
            assert not done()
            bundle.state = BundleState.APPLIED
        assert done()

    log.full_gradients.are_all_here = False
    progress: Any = SimpleNamespace(
        round=Round(plan.slots), lock=threading.RLock(), wait=wait, notify=lambda: None
    )
    log.spreading.ownerships = OwnedShards(plan, 0)
    log.spreading.foreign_chunks.return_value = []
    log.spreading.owned_chunks.return_value = plan.slots[0].chunks
    log.spreading.arm.return_value = []
    unstepped = UnsteppedGradients(plan, progress, log.spreading, log.full_gradients, log.lockstep)
    unstepped.bring()
    names = [name for name, *_ in log.mock_calls]
    assert log.mock_calls[names.index("wait")] == call.wait("updates of a step")
    assert names.index("lockstep.sends") < names.index("wait")
    assert names.index("wait") < names.index("spreading.arm")
    assert names.index("spreading.arm") < names.index("spreading.send_gradients")
    log.lockstep.sends.assert_called_once_with([0, 1])


def test_a_rank_that_keeps_others_than_the_rest_is_a_mismatch(wire: Wire) -> None:
    ranks = both(wire, last_layer)

    def work(number: int) -> str:
        rank = ranks[number]
        rank.train(2)
        if number:
            rank.parameters[0].grad = None
        with pytest.raises((MismatchError, PeerLost)) as raised:
            rank.train(2)
        rank.session.close(release_parameters=False)
        return str(raised.value)

    for message in wire.run(work):
        assert "do not keep the same gradients between backward() and the next forward" in message
