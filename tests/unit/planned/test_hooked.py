"""A plain module's session: what it says, what it adds up, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loopback import Loopback
from looped import SMALL, TIMEOUT_S, Training, check_equal, inputs, mlp, sgd, weights
from torch import Tensor

from bytesched.errors import PeerLost, PluginError, TransportError, UnusedParameterError
from bytesched.plugins.proxies.pending import is_held


@pytest.mark.parametrize(
    ("partition_bytes", "chunks"),
    [(1 << 20, "1 chunk"), (SMALL["partition_bytes"], "7 chunks")],
)
def test_line_at_the_start(
    loopback: Loopback, caplog: pytest.LogCaptureFixture, partition_bytes: int, chunks: str
) -> None:
    training = Training(loopback, partition_bytes=partition_bytes, credit_bytes=1 << 20)
    with caplog.at_level("INFO", logger="bytesched"):
        training.train(2)
    training.flush()
    assert training.session is not None
    training.session.close()
    (line,) = (line for line in caplog.messages if "ranks" in line)
    assert line == (f"1 ranks, 6 tensors, 1.891 KiB in {chunks}, policy priority, mode cross")


def test_an_error_that_the_script_has_seen_is_not_raised_at_the_end(ours: Training) -> None:
    for parameter in ours.model[0].parameters():
        parameter.requires_grad_(False)
    ours.model(inputs(2)).sum().backward()
    with pytest.raises(UnusedParameterError):
        ours.optimizer.step()
    assert ours.session is not None
    assert isinstance(ours.session.error, UnusedParameterError)
    assert ours.session.unseen_error is None


def test_nor_is_one_that_came_of_it(ours: Training) -> None:
    """A peer is gone: what is on the wire fails in our thread, a broadcast in the script's."""
    session = ours.session
    assert session is not None
    session._failures.fail(PeerLost("rank 1 is gone", peers=[1]))
    assert session.unseen_error is session.error
    session.fail(PeerLost("rank 1 is gone, says another group", peers=[1]))
    assert session.unseen_error is None


def test_gradients_that_a_script_refers_to_stay_the_same_tensors(ours: Training) -> None:
    ours.backward()
    gradients = [parameter.grad for parameter in ours.model.parameters()]
    values = [gradient.clone() for gradient in gradients]
    assert ours.session is not None
    ours.session.close()
    for parameter, gradient, value in zip(ours.model.parameters(), gradients, values, strict=True):
        assert parameter.grad is gradient
        assert type(gradient) is Tensor
        assert torch.equal(gradient, value)


@pytest.mark.parametrize("between", ["nothing", "step", "zero_grad"])
def test_a_second_backward_pass_over_one_graph_adds(
    ours: Training, plain: Training, between: str
) -> None:
    for training in (ours, plain):
        training.optimizer.zero_grad()
        training.model(inputs(7))
        # Nothing that a step changes is saved for backward.
        loss: Any = sum((3.0 * parameter).sum() for parameter in training.model.parameters())
        loss.backward(retain_graph=True)
        if between != "nothing":
            getattr(training.optimizer, between)()
        loss.backward()
        training.optimizer.step()
    check_equal(ours, plain)


@pytest.mark.parametrize("rows", [None, 1], ids=["whole", "view"])
def test_a_gradient_that_the_script_keeps_is_not_overwritten_by_the_next_round(
    ours: Training, rows: int | None
) -> None:
    def gradients() -> list[Tensor]:
        parameters = ours.model.parameters()
        return [p.grad if rows is None else p.grad[:rows] for p in parameters]

    ours.backward()
    kept = gradients()
    before = [tensor.clone() for tensor in kept]
    ours.optimizer.step()
    ours.train()
    assert all(map(torch.equal, before, kept))
    assert not any(map(torch.equal, kept, gradients()))


@pytest.fixture
def two() -> Iterator[Loopback]:
    loopback = Loopback(2, timeout_s=TIMEOUT_S)
    yield loopback
    loopback.close()


def test_what_some_ranks_have_no_gradient_of_is_the_mean_and_what_none_has_stays_as_it_was(
    two: Loopback,
) -> None:
    """Rank 0 uses the first two of three layers, rank 1 the first; nothing is zeroed."""
    models = [mlp(), mlp()]

    def on_rank(rank: int) -> list[Tensor]:
        model: Any = models[rank]
        session = two.wrap(model, sgd(model), rank=rank, find_unused=True, **SMALL)
        model(inputs(rank)).sum().backward()
        for parameter in model[3].parameters():
            # Of this rank alone: their mean would be another.
            parameter.grad.mul_(rank + 2.0)
        before = [p.grad.clone() for p in model.parameters()]
        for parameter in list(model.parameters())[:4]:
            parameter.grad = None
        used = model[:2] if rank else model[:3]
        model(inputs(rank))
        used(inputs(rank)).sum().backward()
        after = [p.grad.clone() for p in model.parameters()]
        assert all(map(torch.equal, before[4:], after[4:]))
        session.flush()
        session.close()
        return after[:4]

    first, second = two.run(on_rank)
    expected = []
    for rank in range(2):
        model: Any = mlp()
        (model[:2] if rank else model[:3])(inputs(rank)).sum().backward()
        expected.append([p.grad for p in list(model.parameters())[:4]])
    means = [
        mine / 2 if other is None else mine / 2 + other / 2
        for mine, other in zip(*expected, strict=True)
    ]
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, means))


@pytest.mark.parametrize("end", ["close", "close and keep", "fork"])
def test_what_is_outstanding_at_the_end_is_as_it_was_or_says_why_it_cannot_be_read(
    loopback: Loopback, ours: Training, end: str
) -> None:
    session: Any = ours.session
    before = weights(ours.model)
    loopback.hold()
    ours.train()
    parameters = dict(ours.model.named_parameters())
    if end == "fork":
        # As in a child, no thread of the wire goes on.
        loopback.close()
        session.disown()
        for parameter in parameters.values():
            for tensor in (parameter, parameter.grad):
                with pytest.raises(PluginError):
                    tensor.sum()
        return
    session.fail(TransportError("the cable was cut", task="chunk", rank=0))
    session.close(release_parameters=end == "close")
    if end == "close":
        assert not any(map(is_held, parameters.values()))
        assert all(map(torch.equal, before, weights(ours.model)))
        return
    for parameter in parameters.values():
        with pytest.raises(TransportError, match="the cable was cut"):
            parameter.sum()
