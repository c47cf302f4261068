"""Both lives of a session: what they are told, in which order, and what is safe in either."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from looped import Training, check_equal, inputs, weights

from bytesched.plugins.engine.phase import Life, Phase
from bytesched.plugins.engine.running import Running
from bytesched.plugins.engine.warming import WarmingUp
from bytesched.plugins.stores.training.store_running import StoreRunning
from bytesched.testing import Loopback


class Told:
    """Stands in front of a life, and writes down every call."""

    def __init__(self, life: Any, calls: list[tuple[str, Any]]) -> None:
        self.life = life
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.life, name)
        return self._noted(name, value) if inspect.ismethod(value) else value

    def _noted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls.append((name, kwargs or args))
            result = method(*args, **kwargs)
            return Told(result, self._calls) if name == "end_round" else result

        return call


def rounds_of(training: Training) -> Any:
    session: Any = training.session
    return session._rounds


def life_of(training: Training) -> Any:
    return rounds_of(training).phase


def listen(training: Training) -> list[tuple[str, Any]]:
    calls: list[tuple[str, Any]] = []
    rounds_of(training).phase = Told(life_of(training), calls)
    return calls


def names(calls: list[tuple[str, Any]]) -> list[str]:
    """Without what is only asked when nothing may be outstanding."""
    return [name for name, _ in calls if name != "synchronize_all"]


def promised(protocol: type) -> dict[str, Any]:
    return {
        name: member
        for part in protocol.__mro__
        for name, member in vars(part).items()
        if not name.startswith("_")
    }


@pytest.mark.parametrize(
    ("kind", "protocol"), [(WarmingUp, Phase), (Running, Phase), (StoreRunning, Life)]
)
def test_a_life_has_every_call_with_the_same_arguments(kind: type, protocol: type) -> None:
    for name, member in promised(protocol).items():
        if inspect.isfunction(member):
            theirs = inspect.signature(getattr(kind, name)).parameters
            ours = inspect.signature(member).parameters
            assert [(p.name, p.kind) for p in theirs.values()] == [
                (p.name, p.kind) for p in ours.values()
            ], name


def test_both_lives_are_told_of_an_iteration_in_one_order(loopback: Loopback) -> None:
    training = Training(loopback)
    calls = listen(training)
    gradients = ["gradient"] * len(list(training.model.parameters()))
    for forward in (["forward_begins", "forward_ends"], ["forward_begins"], ["forward_begins"]):
        # Of the forward pass' end only the first life needs to know.
        training.train()
        assert names(calls) == [
            "before_forward",
            *forward,
            "begin_round",
            *gradients,
            "end_round",
            "step",
            "stepped",
        ]
        calls.clear()


def test_gradients_are_told_once_each_as_backward_comes_to_them(loopback: Loopback) -> None:
    training = Training(loopback)
    calls = listen(training)
    for _ in range(2):
        training.train()
        told = [args[0].name for name, args in calls if name == "gradient"]
        assert [name.partition(".")[0] for name in told] == ["3", "3", "2", "2", "0", "0"]
        assert len(set(told)) == len(told)
        calls.clear()


def test_the_first_round_leads_from_one_life_to_the_other_for_good(loopback: Loopback) -> None:
    training = Training(loopback)
    first = life_of(training)
    assert isinstance(first, WarmingUp)
    training.backward()
    second = life_of(training)
    assert isinstance(second, Running)
    assert training.session is not None
    assert training.session.plan is second.plan
    for _ in range(2):
        training.optimizer.step()
        training.backward()
        assert life_of(training) is second


def test_a_life_is_told_how_many_steps_were_taken_before_a_forward_pass(
    loopback: Loopback,
) -> None:
    training = Training(loopback)
    calls = listen(training)
    training.train(2)
    training.optimizer.step()
    training.train()
    assert [args[0] for name, args in calls if name == "before_forward"] == [0, 1, 3]


def test_a_round_begins_with_whether_the_model_was_called_for_it(loopback: Loopback) -> None:
    training = Training(loopback)
    training.train()
    calls = listen(training)
    training.optimizer.zero_grad()
    loss = training.model(inputs(1)).square().mean()
    loss.backward(retain_graph=True)
    training.optimizer.zero_grad()
    loss.backward()
    seen = [args["forward_seen"] for name, args in calls if name == "begin_round"]
    assert seen == [True, False]


#: with nothing under way, they change nothing in either life
SAFE: dict[str, Callable[[Any], object]] = {
    "wait_reduced": lambda life: life.wait_reduced(),
    "synchronize_all": lambda life: life.synchronize_all(),
    "stepped": lambda life: life.stepped(),
}


@pytest.mark.parametrize("steps", [0, 2], ids=["warming up", "running"])
@pytest.mark.parametrize("call", SAFE)
def test_what_ends_waits_is_safe_when_there_is_nothing_to_wait_for(
    loopback: Loopback, steps: int, call: str
) -> None:
    ours, plain = Training(loopback), Training()
    for training in (ours, plain):
        training.train(steps)
    ours.flush()
    before = weights(ours.model)
    state = life_of(ours).state()
    SAFE[call](life_of(ours))
    assert life_of(ours).state() == state
    assert all((old == new).all() for old, new in zip(before, weights(ours.model), strict=True))
    for training in (ours, plain):
        training.train(2)
    check_equal(ours, plain)
