"""A plain module's session: what it says, what it adds up, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fake_wire import Run, inputs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bytesched.errors import PeerLost, PluginError, TransportError, UnusedParameterError
from bytesched.plugins.planned import hooked_session

Pair = Callable[..., tuple[Run, Run]]


@pytest.fixture
def ours(pair: Pair) -> Run:
    return pair()[0]


def test_an_error_that_the_script_has_seen_is_not_raised_at_the_end(ours: Run) -> None:
    ours.model.module[0].requires_grad_(False)
    ours.backward()
    with pytest.raises(UnusedParameterError):
        ours.optimizer.step()
    assert isinstance(ours.session.error, UnusedParameterError)
    assert ours.session.unseen_error is None


def test_nor_is_one_that_came_of_it(ours: Run) -> None:
    """A peer is gone: what is on the wire fails in our thread, a broadcast in the script's."""
    session = ours.session
    session._failures.fail(PeerLost("rank 1 is gone", peers=[1]))
    assert session.unseen_error is session.error
    session.fail(PeerLost("rank 1 is gone, says another group", peers=[1]))
    assert session.unseen_error is None


def test_gradients_that_a_script_refers_to_stay_the_same_tensors(ours: Run) -> None:
    ours.backward()
    gradients = [parameter.grad for parameter in ours.model.parameters()]
    ours.see(*gradients)
    ours.session.close()
    for parameter, gradient, value in zip(
        ours.model.parameters(), gradients, ours.seen, strict=True
    ):
        assert parameter.grad is gradient
        assert type(gradient) is Tensor
        assert torch.equal(gradient, value)


@pytest.mark.parametrize("between", ["nothing", "step", "zero_grad"])
def test_a_second_backward_pass_over_one_graph_adds(pair: Pair, between: str) -> None:
    ours, plain = pair()
    for run in (ours, plain):
        run.optimizer.zero_grad()
        run.model(inputs(7))
        # Nothing that a step changes is saved for backward.
        loss: Any = sum((3.0 * parameter).sum() for parameter in run.model.parameters())
        loss.backward(retain_graph=True)
        if between != "nothing":
            getattr(run.optimizer, between)()
        loss.backward()
        run.optimizer.step()
    assert ours.differences(plain) == []


@pytest.mark.parametrize("end", ["close", "fork"])
def test_what_is_outstanding_at_the_end_is_as_it_was_or_cannot_be_read(
    pair: Pair, end: str
) -> None:
    ours, plain = pair()
    ours.train()
    parameters = list(ours.model.parameters())
    if end == "close":
        ours.session.fail(TransportError("the cable was cut", task="chunk", rank=0))
        ours.session.close()
        assert ours.held == []
        assert all(map(torch.equal, parameters, plain.model.parameters()))
        return
    ours.session.disown()
    for tensor in (*parameters, *(parameter.grad for parameter in parameters)):
        with pytest.raises(PluginError):
            tensor.sum()


def test_who_lets_go_stays_for_what_others_wait_for(pair: Pair) -> None:
    """The numbers of who has used which parameter."""
    (ours, _), stayed = pair(0, find_unused=True), list[Any]()
    vars(ours.wire)["wait_left"] = stayed.extend
    ours.train()
    assert not stayed
    # Here all are used, so that nobody waits for it.
    ours.train()
    ours.session.flush()
    for _ in range(2):
        ours.session.source.let_go()
        assert len(stayed) == 1


def test_a_gradient_of_another_dtype_is_refused_by_its_name(ours: Run) -> None:
    ours.model.double()
    with pytest.raises(PluginError, match=r"bias' is torch.float64 on cpu, it was torch.float32"):
        ours.model(inputs(2).double()).sum().backward()


def test_gradients_that_would_go_to_distributed_autograd_are_refused(
    ours: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooked_session, "are_in_a_context", lambda: True)
    with pytest.raises(PluginError, match="cannot stay wrapped: its gradients go to a context"):
        ours.model(inputs(2))


class Twice(nn.Module):
    """One layer in two reentrant checkpoints, and another one in front, which is last."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.shared = nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


def test_a_second_gradient_in_one_round_is_refused_by_its_name(pair: Pair) -> None:
    ours, _ = pair(0, make=Twice)
    with pytest.raises(PluginError, match=r"\.shared\.\w+' got a second gradient in one round"):
        ours.backward()


def convolution() -> nn.Module:
    torch.manual_seed(7)
    body = nn.Conv2d(2, 4, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4)
    return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), *body)


def strides_of(tensors: Iterable[Any]) -> list[tuple[int, ...]]:
    return [tensor.stride() for tensor in tensors]


@pytest.mark.parametrize("before_step", [True, False])
@pytest.mark.parametrize("converted_at", [0, 3])
def test_converted_to_channels_last(pair: Pair, converted_at: int, before_step: bool) -> None:
    """Compared with plain training and not with DDP.

    Torch 2.13's averages wrong once the strides of a gradient are not those that its buckets were
    made for.
    """
    runs = ours, plain = pair(0, make=convolution, optimizer_of=torch.optim.AdamW)
    strides: list[Any] = [[], []]
    for run, seen in zip(runs, strides, strict=True):
        for step in range(6):
            run.optimizer.zero_grad()
            run.backward()
            for is_stepped in (False, True):
                if step == converted_at and before_step is not is_stepped:
                    run.model.to(memory_format=torch.channels_last)
                if not is_stepped:
                    gradients = [parameter.grad for parameter in run.model.parameters()]
                    run.see(*gradients)
                    seen += strides_of(gradients)
                    run.optimizer.step()
            seen += strides_of(run.model.parameters())
    assert strides[0] == strides[1]
    assert ours.differences(plain) == []
