"""From the second round on: chunks go as gradients come, and what is on the wire is kept apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from looped import SMALL, TIMEOUT_S, Training, check_equal, inputs, mlp, sgd, weights
from torch import Tensor

from bytesched.errors import PluginError, TransportError
from bytesched.plugins.proxies.pending import is_held
from bytesched.testing import Loopback


def session_of(training: Training) -> Any:
    assert training.session is not None
    return training.session


class Waits:
    """What is waited for; the wire, which is held, goes on when somebody waits."""

    def __init__(self, training: Training, loopback: Loopback, patch: pytest.MonkeyPatch) -> None:
        progress = session_of(training)._progress
        self.told: list[str] = []
        wait = progress.wait

        def noting(done: Any, what: str) -> None:
            self.told.append(what)
            loopback.release()
            wait(done, what)

        loopback.hold()
        patch.setattr(progress, "wait", noting)


def test_a_chunk_is_on_the_wire_when_its_gradients_are_there(
    loopback: Loopback, ours: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    add = loopback.add

    def noting(key: object, *args: Any) -> None:
        sent.append(key)
        add(key, *args)

    monkeypatch.setattr(loopback, "add", noting)
    session = session_of(ours)
    slots = {slot.name: slot for slot in session.slots}
    ours.optimizer.zero_grad()
    hidden = ours.model[:2](inputs(0))
    ours.model(inputs(0))
    ours.model[2:](hidden.detach()).square().mean().backward()
    late = {chunk.index for name in ("0.weight", "0.bias") for chunk in slots[name].chunks}
    # A chunk that both have a part of waits for the other.
    early = [chunk.index for chunk in session.plan.chunks if chunk.index not in late]
    assert sorted(sent) == early
    assert sent.index(slots["3.weight"].chunks[-1].index) < sent.index(
        slots["2.weight"].chunks[-1].index
    )
    hidden.square().mean().backward()
    assert sorted(sent) == sorted([*early, *late])


def test_it_shows_what_is_outstanding(loopback: Loopback, ours: Training) -> None:
    session = session_of(ours)
    counts = len(session.plan.chunks), len(session.plan.bundles)
    assert counts[0] > 6
    loopback.hold()
    ours.backward()
    assert f"{counts[0]} chunks outstanding, 0 bundles held" in repr(session)
    ours.optimizer.step()
    assert f"{counts[0]} chunks outstanding, {counts[1]} bundles held" in repr(session)
    loopback.release()
    ours.flush()
    assert "0 chunks outstanding, 0 bundles held" in repr(session)


@pytest.mark.parametrize("between", ["nothing", "zero_grad", "step"])
def test_a_second_backward_pass_over_one_graph_needs_something_in_between(
    loopback: Loopback,
    ours: Training,
    plain: Training,
    monkeypatch: pytest.MonkeyPatch,
    between: str,
) -> None:
    waits = Waits(ours, loopback, monkeypatch)

    def passes(training: Training) -> None:
        training.optimizer.zero_grad()
        training.model(inputs(7))
        # Nothing that a step changes is saved for backward.
        loss = sum((3.0 * parameter).sum() for parameter in training.model.parameters())
        assert isinstance(loss, Tensor)
        loss.backward(retain_graph=True)
        if between != "nothing":
            getattr(training.optimizer, between)()
        if between == "step":
            # An update that is outstanding would be one that nothing has read.
            training.flush()
        loss.backward()
        training.optimizer.step()

    if between == "nothing":
        with pytest.raises(
            PluginError,
            match=r"backward\(\) ran again on rank 0 without a forward pass of the wrapped model, "
            r"a step\(\) or zero_grad\(\) in between",
        ):
            passes(ours)
        return
    passes(ours)
    # Its gradients go where those of the first have been.
    assert "all gradients" in waits.told
    passes(plain)
    check_equal(ours, plain)


@pytest.mark.parametrize("is_stepped", [False, True])
def test_a_forward_pass_waits_for_what_no_step_has_taken(
    loopback: Loopback,
    ours: Training,
    plain: Training,
    monkeypatch: pytest.MonkeyPatch,
    is_stepped: bool,
) -> None:
    """Backward would add to gradients on the wire; what a step has taken is waited for by gates."""
    waits = Waits(ours, loopback, monkeypatch)
    for training in (ours, plain):
        training.backward()
        if is_stepped:
            training.optimizer.step()
        assert waits.told == []
        loss = training.model(inputs(9)).square().mean()
        if training is ours:
            assert waits.told[0] == ("the update of '0.weight'" if is_stepped else "all gradients")
            assert ("all gradients" in waits.told) is not is_stepped
            waits.told.clear()
        loss.backward()
        training.optimizer.step()
        waits.told.clear()
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


def test_a_gradient_of_another_dtype_is_refused_by_its_name(ours: Training) -> None:
    ours.model.double()
    with pytest.raises(
        PluginError,
        match=r"the gradient of '3\.bias' is torch\.float64 on cpu, it was torch\.float32 on cpu: "
        r"unwrap before the model is converted",
    ):
        ours.model(inputs(0).double()).sum().backward()


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
    session = session_of(ours)
    before = weights(ours.model)
    loopback.hold()
    ours.train()
    parameters = dict(ours.model.named_parameters())
    if end == "fork":
        # As in a child, no thread of the wire goes on.
        loopback.close()
        session.disown()
        for name, parameter in parameters.items():
            for what, tensor in ((name, parameter), (f"{name}.grad", parameter.grad)):
                with pytest.raises(PluginError, match=f"'{what}' was outstanding when this proce"):
                    tensor.sum()
        return
    session.fail(TransportError("the cable was cut", task="chunk", rank=0))
    session.close(release_parameters=end == "close")
    if end == "close":
        assert not any(map(is_held, parameters.values()))
        assert all(map(torch.equal, before, weights(ours.model)))
        assert all(type(parameter.grad) is Tensor for parameter in parameters.values())
        return
    for parameter in parameters.values():
        with pytest.raises(TransportError, match="the cable was cut"):
            parameter.sum()
