"""Torch trained through a store that updates, within one process, against plain training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_wire import inputs, mlp
from together import TIMEOUT_S
from torch import Tensor, nn
from training import SMALL

import bytesched
from bytesched.config import Config
from bytesched.errors import PluginError
from bytesched.kvstore import Key, LocalKVStore
from bytesched.plugins.stores.mpi.entry import ServerOptimizer
from bytesched.plugins.stores.training import begin as kvstore_training
from bytesched.plugins.stores.training.session import StoreSession

STEPS = 5
CONFIG = Config(timeout_s=TIMEOUT_S, **SMALL)


class Updating(LocalKVStore):
    """A store of one worker that updates floating-point keys by an optimizer of torch."""

    updates = True
    is_stateful = False

    def __init__(self) -> None:
        super().__init__(updater=self._keep)
        self._pushed: dict[Key, Tensor] = {}
        self._name = ""
        self._optimizers: dict[Key, ServerOptimizer] = {}
        self._hyperparameters: dict[str, Any] = {}
        #: values that were set, not pushed
        self.sets = 0

    def set_optimizer(self, name: str, **hyperparameters: Any) -> None:
        self._name = name

    def set_hyperparameters(self, **hyperparameters: Any) -> None:
        self._hyperparameters = hyperparameters

    def init(self, key: Key, value: Tensor) -> None:
        super().init(key, value)
        if self._name and value.is_floating_point():
            self._optimizers[key] = ServerOptimizer(self._name, self._value(key), {})

    def _value(self, key: Key) -> Tensor:
        value: Tensor = self._shared.entries[key].value
        return value

    def _keep(self, key: Key, total: Tensor, value: Tensor) -> None:
        self._pushed[key] = total

    def pull(self, key: Key, out: Tensor, priority: int = 0) -> None:
        """By then, hyper-parameters are those of the step."""
        if (pushed := self._pushed.pop(key, None)) is not None:
            if key in self._optimizers:
                self._optimizers[key].update(pushed, self._hyperparameters)
            else:
                self._value(key).copy_(pushed)
        super().pull(key, out)

    def get_state(self, key: Key) -> dict[str, Tensor]:
        kept = {name: entry.clone() for name, entry in self._optimizers[key].state.items()}
        return {"value": self._value(key).clone(), **kept}

    def set_state(self, key: Key, state: dict[str, Tensor]) -> None:
        self.sets += 1
        self._value(key).copy_(state["value"])
        if more := {name: entry for name, entry in state.items() if name != "value"}:
            self._optimizers[key].load(more)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.step()


def plain(steps: range = range(STEPS)) -> list[Tensor]:
    model = mlp()
    train(model, adam(model), steps)
    return list(model.parameters())


class Training:
    """A model whose parameters a store updates."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.store = Updating()
        self.model = mlp()
        self.optimizer = adam(self.model)
        self.session: StoreSession = kvstore_training.attach(
            self.optimizer, self.model, self.store, config
        )

    def equals(self, expected: list[Tensor]) -> bool:
        self.session.flush()
        return all(map(torch.equal, expected, self.model.parameters()))


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.session.close()


def test_it_has_the_bits_of_plain_training(training: Training) -> None:
    train(training.model, training.optimizer, range(STEPS))
    stats = training.session.stats()
    assert training.equals(plain())
    assert stats["mode"] == "store"
    assert stats["order"] == "each worker's own"
    assert float(stats["chunks"]) > 4
    assert float(stats["comm_ms"]) > 0
    assert float(stats["scheduler_cpu_us_per_chunk"]) > 0
    assert float(stats["bytes_per_step"]) == sum(p.nbytes for p in training.model.parameters())
    assert not training.optimizer.state
    assert not training.store.sets


def test_a_step_that_may_not_cross_has_updated_when_it_is_over() -> None:
    training = Training(Config(**{**CONFIG.__dict__, "cross_barrier": False}))
    train(training.model, training.optimizer, range(STEPS))
    assert all(type(p) is nn.Parameter for p in training.model.parameters())
    assert training.session.stats()["barrier_crossed_steps"] == 0
    assert training.equals(plain())
    training.session.close()


def in_a_closure(training: Training, step: int) -> None:
    def closure() -> float:
        training.optimizer.zero_grad()
        loss: Tensor = training.model(inputs(step)).square().mean()
        loss.backward()
        return loss.item()

    assert training.optimizer.step(closure) > 0


def in_several_passes(training: Training, step: int) -> None:
    training.model(inputs(step))
    middle = training.model[:2](inputs(step))
    cut = middle.detach().requires_grad_()
    training.model[2:](cut).square().mean().backward()
    middle.backward(cut.grad)
    training.optimizer.step()


def before_that_of_another_model(training: Training, step: int) -> None:
    training.model(inputs(step)).square().mean().backward()
    nn.Linear(8, 2)(inputs(step)).sum().backward()
    training.optimizer.step()


@pytest.mark.parametrize("way", [in_a_closure, in_several_passes, before_that_of_another_model])
def test_wherever_its_backward_pass_is(
    training: Training, way: Callable[[Training, int], None]
) -> None:
    for step in range(STEPS):
        training.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        training.optimizer.zero_grad()
        way(training, step)
    assert training.equals(plain())


def test_parameters_that_were_changed_here_go_to_the_store(training: Training) -> None:
    model = mlp()
    optimizer = adam(model)
    for one, by in ((model, optimizer), (training.model, training.optimizer)):
        train(one, by, range(2))
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(0.5)
        train(one, by, range(2, STEPS))
    assert training.equals(list(model.parameters()))


def test_gradients_cannot_be_read_in_any_round(training: Training) -> None:
    model, optimizer = training.model, training.optimizer
    weight: Any = model[0].weight
    for step in range(3):
        model(inputs(step)).square().mean().backward()
        for read in (
            lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: optimizer.zero_grad(set_to_none=False),
            lambda: weight.grad + 1,
        ):
            with pytest.raises(PluginError, match=r"the gradient of '0\.weight' is in the store"):
                read()
        assert weight.grad.shape == (16, 8)
        optimizer.step()
        assert weight.grad is None


#: MXNet's, by its module
TRAINER: Any = type("Trainer", (), {"__module__": "mxnet.gluon.trainer"})()


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        (lambda: Training(replace(CONFIG, share="jobs")), "share is not for a store that updates"),
        (lambda: bytesched.wrap(LocalKVStore(), share="jobs"), "share is for models of torch"),
        (lambda: bytesched.wrap(TRAINER, share="jobs"), "share is for models of torch"),
    ],
    ids=["a store that updates", "a store alone", "MXNet"],
)
def test_devices_are_not_shared(begin: Callable[[], object], why: str) -> None:
    with pytest.raises(PluginError, match=why):
        begin()


def test_a_second_gradient_before_the_step_is_refused(training: Training) -> None:
    model = training.model
    train(model, training.optimizer, range(2))
    model(inputs(2)).square().mean().backward()
    # Another model's pass is none of this one's.
    nn.Linear(8, 2)(inputs(2)).sum().backward()
    with pytest.raises(PluginError, match=r"second gradient before step\(\)"):
        model(inputs(3)).square().mean().backward()
    assert training.session.error is not None


def test_a_step_without_gradients_changes_nothing(training: Training) -> None:
    train(training.model, training.optimizer, range(STEPS))
    training.optimizer.step()
    assert training.equals(plain())


def test_what_is_left_after_the_end_is_ordinary(training: Training) -> None:
    train(training.model, training.optimizer, range(2))
    training.model(inputs(2)).square().mean().backward()
    training.session.close()
    assert all(p.grad is None for p in training.model.parameters())
    assert all(type(p) is nn.Parameter for p in training.model.parameters())
