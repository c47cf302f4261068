"""A plain module's session: what it says, what it adds up, and what it refuses by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loopback import Loopback
from looped import SMALL, Training, check_equal, inputs, weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bytesched.errors import PeerLost, PluginError, TransportError, UnusedParameterError
from bytesched.plugins.planned import hooked_session
from bytesched.plugins.proxies.pending import is_held


def test_an_error_that_the_script_has_seen_is_not_raised_at_the_end(ours: Training) -> None:
    for parameter in ours.model[0].parameters():
        parameter.requires_grad_(False)
    ours.model(inputs(2)).sum().backward()
    with pytest.raises(UnusedParameterError):
        ours.optimizer.step()
    assert isinstance(ours.session.error, UnusedParameterError)
    assert ours.session.unseen_error is None


def test_nor_is_one_that_came_of_it(ours: Training) -> None:
    """A peer is gone: what is on the wire fails in our thread, a broadcast in the script's."""
    session = ours.session
    session._failures.fail(PeerLost("rank 1 is gone", peers=[1]))
    assert session.unseen_error is session.error
    session.fail(PeerLost("rank 1 is gone, says another group", peers=[1]))
    assert session.unseen_error is None


def test_gradients_that_a_script_refers_to_stay_the_same_tensors(ours: Training) -> None:
    ours.backward()
    gradients = [parameter.grad for parameter in ours.model.parameters()]
    values = [gradient.clone() for gradient in gradients]
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


@pytest.mark.parametrize("end", ["close", "close and keep", "fork"])
def test_what_is_outstanding_at_the_end_is_as_it_was_or_says_why_it_cannot_be_read(
    loopback: Loopback, ours: Training, end: str
) -> None:
    session = ours.session
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


def test_who_lets_go_stays_for_what_others_wait_for(loopback: Loopback) -> None:
    """The numbers of who has used which parameter."""
    training, stayed = Training(loopback, find_unused=True), list[Any]()
    vars(loopback.wires[0])["wait_left"] = stayed.extend
    training.train(1)
    assert not stayed
    # Here all are used, so that nobody waits for it.
    training.train(1)
    training.flush()
    session = training.session
    for _ in range(2):
        session.source.let_go()
        assert len(stayed) == 1
    session.close()


def test_a_gradient_of_another_dtype_is_refused_by_its_name(ours: Training) -> None:
    ours.model.double()
    with pytest.raises(PluginError, match=r"bias' is torch.float64 on cpu, it was torch.float32"):
        ours.model(inputs(2).double()).sum().backward()


def test_gradients_that_would_go_to_distributed_autograd_are_refused(
    ours: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooked_session, "are_in_a_context", lambda: True)
    with pytest.raises(PluginError, match="cannot stay wrapped: its gradients go to a context"):
        ours.model(inputs(2))


def test_a_second_gradient_in_one_round_is_refused_by_its_name(loopback: Loopback) -> None:
    class Twice(nn.Module):
        """One layer in two reentrant checkpoints, and another one in front, which is last."""

        def __init__(self) -> None:
            super().__init__()
            self.front, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.front(x)
            for _ in range(2):
                x = checkpoint(self.shared, x, use_reentrant=True)
            return x

    model = Twice()
    session = loopback.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(PluginError, match=r"'shared\.\w+' got a second gradient in one round"):
        model(torch.ones(2, 4)).sum().backward()
    session.close()


def trained(loopback: Loopback | None, converted_at: int, *, before_step: bool) -> list[Tensor]:
    """All gradients and weights that a script sees that converts its model in the middle.

    Compared with plain training and not with DDP: torch 2.13's averages wrong once the strides of
    a gradient are not those that its buckets were made for.
    """
    torch.manual_seed(7)
    model: Any = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(16, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if loopback is not None:
        loopback.wrap(model, optimizer, **SMALL)
    seen: list[Tensor] = []
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        for is_stepped in (False, True):
            if step == converted_at and before_step is not is_stepped:
                model.to(memory_format=torch.channels_last)
            if not is_stepped:
                seen += [p.grad.clone() for p in model.parameters()]
                optimizer.step()
        seen += [p.detach().clone() for p in model.parameters()]
    return seen


def strides_of(tensor: Tensor) -> list[int]:
    # A stride means nothing where there is one element.
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1]


@pytest.mark.parametrize("before_step", [True, False])
@pytest.mark.parametrize("converted_at", [0, 3])
def test_converted_to_channels_last(
    loopback: Loopback, converted_at: int, before_step: bool
) -> None:
    plain = trained(None, converted_at, before_step=before_step)
    ours = trained(loopback, converted_at, before_step=before_step)
    for one, other in zip(plain, ours, strict=True):
        assert torch.equal(one, other)
        assert strides_of(one) == strides_of(other)
