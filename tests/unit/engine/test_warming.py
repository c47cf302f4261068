"""The first round: nothing is sent before all of it is there, and what it shows holds from then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from looped import SMALL, TIMEOUT_S, Training, check_equal, inputs, mlp, sgd, weights
from torch import Tensor, nn

from bytesched.errors import PeerLost, TransportError, UnusedParameterError
from bytesched.plugins.proxies.pending import is_held
from bytesched.testing import Loopback


class Crossed(nn.Module):
    """Uses its layers in another order than it has registered them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.factor = nn.Parameter(torch.ones(8))
        self.last, self.first, self.middle = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, values: Tensor) -> Any:
        return self.last(self.middle(self.first(values))) * self.factor


def test_before_its_end_there_is_no_plan_and_nothing_to_wait_for(loopback: Loopback) -> None:
    training = Training(loopback)
    session: Any = training.session
    training.model(inputs(0))
    session.wait_reduced()
    session.flush()
    session.restore()
    session.leave()
    assert session.plan is None
    figures = session.stats()
    assert (figures["order"], figures["chunks"]) == ("planned", 0)
    assert not session.rounds_finished


def test_nothing_is_sent_before_the_last_gradient_is_there(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = loopback.backends[0]
    sent: list[int] = []
    reduce = backend.reduce

    def noting(chunk: Any, packed: Tensor) -> Any:
        sent.append(chunk.nbytes)
        return reduce(chunk, packed)

    monkeypatch.setattr(backend, "reduce", noting)
    training = Training(loopback)
    session: Any = training.session
    # Chunks in the hands of the carrier would stay there.
    loopback.hold()
    hidden = training.model[:2](inputs(0))
    training.model(inputs(0))
    training.model[2:](hidden.detach()).square().mean().backward()
    assert session.is_interrupted
    assert not sent
    hidden.square().mean().backward()
    assert sent == [chunk.nbytes for chunk in session.plan.chunks]
    assert sum(sent) == sum(p.numel() * 4 for p in training.model.parameters())
    assert not session.is_inside_round


def test_its_gradients_are_the_mean_its_step_is_a_plain_one_and_the_next_one_is_not() -> None:
    loopback = Loopback(2, timeout_s=TIMEOUT_S)
    trainings = [Training(), Training()]
    plain = Training()

    def on_rank(rank: int) -> list[Tensor]:
        ours = trainings[rank]
        ours.session = loopback.wrap(ours.model, ours.optimizer, rank=rank, **SMALL)
        parameters = list(ours.model.parameters())
        ours.model(inputs(rank)).square().mean().backward()
        found = [parameter.grad.clone() for parameter in parameters]
        ours.optimizer.step()
        # All of it was there: no update is left for later.
        assert not any(is_held(parameter) for parameter in parameters)
        loopback.hold()
        ours.optimizer.zero_grad()
        ours.model(inputs(rank)).square().mean().backward()
        ours.optimizer.step()
        assert all(is_held(parameter) for parameter in parameters)
        return found

    try:
        first, second = loopback.run(on_rank)
        loopback.release()
        for number in range(2):
            means = []
            for rank in range(2):
                plain.optimizer.zero_grad()
                plain.model(inputs(rank)).square().mean().backward()
                means.append([parameter.grad / 2 for parameter in plain.model.parameters()])
            for parameter, *halves in zip(plain.model.parameters(), *means, strict=True):
                parameter.grad = sum(halves)
            if number == 0:
                expected = [parameter.grad.clone() for parameter in plain.model.parameters()]
                assert all(map(torch.equal, first, expected))
                assert all(map(torch.equal, second, expected))
            plain.optimizer.step()
        for training in trainings:
            check_equal(training, plain)
    finally:
        loopback.close()


def test_what_follows_is_sent_in_the_order_of_first_use(
    loopback: Loopback, caplog: pytest.LogCaptureFixture
) -> None:
    model = Crossed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = loopback.wrap(model, optimizer, **SMALL)
    with caplog.at_level("INFO", logger="bytesched"):
        model(inputs(0)).sum().backward()
    assert session.plan is not None
    *_, said = caplog.messages
    assert said.startswith("1 ranks, 7 tensors, ")
    assert said.endswith(", mode cross")
    used = [slot.name.partition(".")[0] for slot in session.plan.slots]
    assert used == ["first", "first", "middle", "middle", "last", "last", "factor"]
    priorities = [chunk.priority for chunk in session.plan.chunks]
    assert priorities == sorted(priorities)


@pytest.mark.parametrize(
    ("said", "is_missing", "rounds"),
    [(None, True, 3), (None, False, 2), (True, False, 3), (False, True, 0)],
)
def test_whether_a_gradient_may_be_missing_is_as_was_said_or_as_the_first_round_shows(
    loopback: Loopback, said: bool | None, is_missing: bool, rounds: int
) -> None:
    model: Any = mlp()
    optimizer = sgd(model)
    session = loopback.wrap(model, optimizer, find_unused=said, **SMALL)
    parts = [model[:2] if is_missing else model, model, model[:2]]
    for number, part in enumerate(parts):
        optimizer.zero_grad()
        part(inputs(number)).square().mean().backward()
        if number < rounds:
            optimizer.step()
            continue
        with pytest.raises(UnusedParameterError, match=r"4 parameters got no gradient.*2\.weight"):
            optimizer.step()
        break
    assert session.rounds_finished == rounds
    session.close()


def test_an_error_in_the_first_round_is_final_and_the_other_ranks_hear_of_it() -> None:
    """They have given their part in a sum that will never be complete."""
    loopback = Loopback(2, timeout_s=TIMEOUT_S)
    error = TransportError("the cable was cut", task="the first iteration", rank=1)

    def cut(*_: object) -> None:
        raise error

    loopback.backends[1].reduce = cut  # type: ignore[method-assign,assignment]
    models = [mlp(), mlp()]

    def on_rank(rank: int) -> Any:
        optimizer = sgd(models[rank])
        session = loopback.wrap(models[rank], optimizer, rank=rank, **SMALL)
        loss = models[rank](inputs(rank)).square().mean()
        with pytest.raises((PeerLost, TransportError)) as raised:
            loss.backward()
        assert session.error is raised.value
        assert session.unseen_error is None
        assert session.plan is None
        with pytest.raises(type(raised.value)):
            models[rank](inputs(rank))
        session.close()
        return raised.value

    try:
        told, own = loopback.run(on_rank)
    finally:
        loopback.close()
    assert own is error
    assert isinstance(told, PeerLost)
    assert "rank 1 gave up: TransportError: " in str(told)
    assert "the cable was cut" in str(told)


@pytest.mark.parametrize("end", ["close", "disown"])
def test_a_session_that_ends_before_it_leaves_an_ordinary_model(
    loopback: Loopback, end: str
) -> None:
    ours, plain = Training(loopback), Training()
    session: Any = ours.session
    ours.model(inputs(0))
    getattr(session, end)()
    for training in (ours, plain):
        training.train(2)
    assert not session.rounds_finished
    assert all(map(torch.equal, weights(ours.model), weights(plain.model)))
    assert all(type(parameter.grad) is Tensor for parameter in ours.model.parameters())
