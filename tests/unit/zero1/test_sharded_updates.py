"""Steps of a sharded session: each rank updates what it owns, and has what a plain one would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from looped import TIMEOUT_S, sgd, weights
from sharded_ranks import OWNERS, Averaged, Rank, Wire, both
from torch import nn
from torch.optim import Optimizer

from bytesched.errors import MismatchError, PeerLost, PluginError

STEPS = 4


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def check_equal(ranks: list[Rank], plain: Averaged) -> None:
    for rank in ranks:
        assert all(map(torch.equal, weights(rank.model), weights(plain.model)))


@pytest.mark.parametrize("crosses", [True, False])
@pytest.mark.parametrize("optimizer_of", [sgd, adamw])
def test_all_ranks_have_the_bits_of_a_plain_optimizer(
    wire: Wire, optimizer_of: Callable[[nn.Module], Optimizer], crosses: bool
) -> None:
    ranks = both(wire, optimizer_of, cross_barrier=crosses)

    def work(number: int) -> None:
        ranks[number].train(STEPS)
        ranks[number].end()

    wire.run(work)
    plain = Averaged(optimizer_of)
    plain.train(STEPS)
    check_equal(ranks, plain)


def test_a_rank_has_state_of_what_it_owns_alone(wire: Wire) -> None:
    ranks = both(wire, adamw)

    def work(number: int) -> list[int | None]:
        rank = ranks[number]
        rank.train(STEPS)
        rank.session.flush()
        state = rank.optimizer.state
        entries = [dict.get(state, parameter) for parameter in rank.parameters]
        rank.session.leave()
        return [None if entry is None else entry["exp_avg"].numel() for entry in entries]

    for number, found in enumerate(wire.run(work)):
        sizes = [parameter.numel() for parameter in ranks[0].parameters]
        assert found == [
            size // 2 if owner is None else size if owner == number else None
            for size, owner in zip(sizes, OWNERS, strict=True)
        ]


def test_a_step_does_not_wait_for_what_others_send(wire: Wire) -> None:
    """And what is set after it does not count for it."""
    ranks = both(wire, sgd)

    met = threading.Barrier(2)

    def work(number: int) -> bool:
        rank = ranks[number]
        rank.train(2)
        rank.session.flush()
        met.wait(TIMEOUT_S)
        wire.hold()
        rank.train(1, first=2)
        rank.optimizer.param_groups[0]["lr"] = 100.0
        is_held = rank.session.is_inside_round
        met.wait(TIMEOUT_S)
        wire.release()
        rank.end()
        return is_held

    assert wire.run(work) == [True, True]
    plain = Averaged(sgd)
    plain.train(3)
    check_equal(ranks, plain)


def test_a_step_takes_what_the_script_has_made_of_a_gradient(wire: Wire) -> None:
    """Put another in its place, written to it, or noted a change, as queries do."""
    ranks = both(wire, adamw)
    factors = 3.0, 0.25, 0.5

    def halve(views: list[torch.Tensor]) -> None:
        torch._foreach_mul_(views, factors[2])

    def work(number: int) -> None:
        rank = ranks[number]
        for step in range(STEPS):
            rank.optimizer.zero_grad()
            rank.backward(step)
            for at, slot in enumerate(rank.session.slots):
                grad = slot.parameter.grad
                assert grad is not None
                if (at + step) % 3 == 0:
                    slot.parameter.grad = grad * factors[0]
                elif (at + step) % 3 == 1:
                    grad.mul_(factors[1])
                else:
                    slot.changes.append(halve)
            rank.optimizer.step()
        rank.end()

    wire.run(work)
    plain = Averaged(adamw)
    for step in range(STEPS):
        plain.optimizer.zero_grad()
        plain.backward(step)
        for at, parameter in enumerate(plain.model.parameters()):
            assert parameter.grad is not None
            parameter.grad.mul_(factors[(at + step) % 3])
        plain.optimizer.step()
    check_equal(ranks, plain)


def test_parameters_with_other_memory_are_followed(wire: Wire) -> None:
    ranks = both(wire, sgd)

    def work(number: int) -> None:
        rank = ranks[number]
        rank.train(2)
        rank.session.flush()
        for parameter in rank.parameters:
            parameter.data = parameter.data.clone()
        rank.train(2, first=2)
        rank.end()

    wire.run(work)
    plain = Averaged(sgd)
    plain.train(4)
    check_equal(ranks, plain)


def test_what_is_not_of_the_model_is_updated_by_every_rank(wire: Wire) -> None:
    extra = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    ranks = both(wire, sgd)
    for rank, parameter in zip(ranks, extra, strict=True):
        rank.optimizer.add_param_group({"params": [parameter], "lr": 0.5, "momentum": 0.0})

    def work(number: int) -> None:
        rank = ranks[number]
        for step in range(STEPS):
            rank.optimizer.zero_grad()
            rank.backward(step)
            extra[number].grad = torch.ones(3)
            rank.optimizer.step()
        rank.end()

    wire.run(work)
    plain = Averaged(sgd)
    plain.train(STEPS)
    check_equal(ranks, plain)
    for parameter in extra:
        assert parameter.tolist() == [1.0 - 0.5 * STEPS] * 3


def test_a_gradient_that_one_rank_alone_has_dropped_is_a_mismatch(wire: Wire) -> None:
    ranks = both(wire, sgd)

    def go_on(rank: Rank) -> None:
        rank.optimizer.step()
        rank.train(1, first=3)
        rank.session.flush()

    def work(number: int) -> str:
        rank = ranks[number]
        rank.train(2)
        rank.optimizer.zero_grad()
        rank.backward(2)
        if number:
            rank.parameters[1].grad = None
        with pytest.raises((MismatchError, PeerLost)) as raised:
            go_on(rank)
        rank.session.close(release_parameters=False)
        return str(raised.value)

    for message in wire.run(work):
        assert "on one of them a gradient was set to None" in message


def test_a_step_does_not_take_what_backward_has_added_to_gradients_of_the_last_one(
    wire: Wire,
) -> None:
    ranks = both(wire, sgd)

    def work(number: int) -> str:
        rank = ranks[number]
        rank.train(2)
        rank.backward(2)
        with pytest.raises(PluginError) as raised:
            rank.optimizer.step()
        rank.session.close(release_parameters=False)
        return str(raised.value)

    for message in wire.run(work):
        assert "backward() adds to" in message
        assert "call zero_grad() between step() and the next backward()" in message
