"""Torch trained through a store that updates, within one process, against plain training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bytesched.config import Config
from bytesched.errors import PluginError, UnusedParameterError
from bytesched.kvstore import Key
from bytesched.plugins.stores.training import begin as kvstore_training
from bytesched.plugins.stores.training.session import StoreSession

STEPS = 5
TIMEOUT_S = 100.0
SMALL = Config(partition_bytes=256, credit_bytes=512, timeout_s=TIMEOUT_S)


class Updating:
    """A store of one worker that updates floating-point keys when they are pulled."""

    rank, num_workers, updates = 0, 1, True

    def __init__(self) -> None:
        self.values: dict[Key, Tensor] = {}
        self.pushed: dict[Key, Tensor] = {}
        self.optimizers: dict[Key, torch.optim.Optimizer] = {}
        self.hyperparameters: dict[str, Any] = {}
        self.kind: type[torch.optim.Optimizer] | None = None
        #: values that were set, not pushed
        self.sets = 0

    def set_optimizer(self, name: str, **hyperparameters: Any) -> None:
        self.kind = getattr(torch.optim, name)

    def set_hyperparameters(self, **hyperparameters: Any) -> None:
        self.hyperparameters = hyperparameters

    def init(self, key: Key, value: Tensor) -> None:
        assert key not in self.values
        self.values[key] = value.clone()
        if self.kind is not None and value.is_floating_point():
            arguments: dict[str, Any] = {"lr": 0.0}
            self.optimizers[key] = self.kind([self.values[key]], **arguments)

    def delete(self, key: Key) -> None:
        del self.values[key]

    def push(self, key: Key, value: Tensor, priority: int = 0) -> None:
        assert key not in self.pushed, "pushed twice"
        self.pushed[key] = value.clone()

    def pull(self, key: Key, out: Tensor, priority: int = 0) -> None:
        value = self.values[key]
        if (pushed := self.pushed.pop(key, None)) is not None:
            optimizer = self.optimizers.get(key)
            if optimizer is None:
                value.copy_(pushed)
            else:
                optimizer.param_groups[0].update(self.hyperparameters)
                value.grad = pushed
                optimizer.step()
        out.copy_(value)

    def pushpull(self, key: Key, value: Tensor) -> None:
        self.push(key, value)
        self.pull(key, value)

    def get_state(self, key: Key) -> dict[str, Tensor]:
        state = self.optimizers[key].state[self.values[key]]
        kept = {name: torch.as_tensor(entry).clone() for name, entry in state.items()}
        return {"value": self.values[key].clone(), **kept}

    def set_state(self, key: Key, state: dict[str, Tensor]) -> None:
        self.sets += 1
        copied = {name: entry.clone() for name, entry in state.items()}
        self.values[key].copy_(copied.pop("value"))
        if copied:
            self.optimizers[key].state[self.values[key]] = copied

    def close(self) -> None:
        pass


def mlp() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def plain(steps: range = range(STEPS)) -> list[Tensor]:
    model = mlp()
    train(model, adam(model), steps)
    return [p.detach() for p in model.parameters()]


class Training:
    """A model whose parameters a store updates."""

    def __init__(self, config: Config = SMALL) -> None:
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
    training = Training(Config(**{**SMALL.__dict__, "cross_barrier": False}))
    train(training.model, training.optimizer, range(STEPS))
    assert all(type(p) is nn.Parameter for p in training.model.parameters())
    assert training.session.stats()["barrier_crossed_steps"] == 0
    assert training.equals(plain())
    training.session.close()


def test_the_backward_pass_may_be_in_a_closure(training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)

        def closure(step: int = step) -> float:
            training.optimizer.zero_grad()
            loss: Tensor = training.model(batch(step)).square().mean()
            loss.backward()
            return loss.item()

        assert training.optimizer.step(closure) > 0
    assert training.equals(plain())


def test_gradients_may_come_in_several_passes(training: Training) -> None:
    front, back = training.model[:2], training.model[2:]
    for step in range(STEPS):
        training.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        training.optimizer.zero_grad()
        training.model(batch(step))
        middle = front(batch(step))
        cut = middle.detach().requires_grad_()
        back(cut).square().mean().backward()
        middle.backward(cut.grad)
        training.optimizer.step()
    assert training.equals(plain())


def test_a_checkpoint_has_the_state_of_the_store(training: Training) -> None:
    model, optimizer = training.model, training.optimizer
    train(model, optimizer, range(3))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    state = optimizer.state_dict()
    assert state["state"][0]["exp_avg"].shape == (16, 8)
    train(model, optimizer, range(3, STEPS))
    # Here, in the first forward pass of another session, and between steps.
    other = Training()
    for one in (training, other):
        one.model.load_state_dict(weights)
        one.optimizer.load_state_dict(state)
        train(one.model, one.optimizer, range(3, STEPS))
        assert one.equals(plain())
    other.session.close()


def test_parameters_that_were_changed_here_go_to_the_store(training: Training) -> None:
    model = mlp()
    optimizer = adam(model)
    for one, by in ((model, optimizer), (training.model, training.optimizer)):
        train(one, by, range(2))
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(0.5)
        train(one, by, range(2, STEPS))
    assert training.equals([p.detach() for p in model.parameters()])


def refused(
    training: Training, error: type[PluginError], text: str, call: Callable[[], Any]
) -> None:
    with pytest.raises(error, match=text):
        call()


def test_gradients_cannot_be_read_in_any_round(training: Training) -> None:
    model, optimizer = training.model, training.optimizer
    weight: Any = model[0].weight
    for step in range(3):
        model(batch(step)).square().mean().backward()
        for read in (
            lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: optimizer.zero_grad(set_to_none=False),
            lambda: weight.grad + 1,
        ):
            refused(training, PluginError, r"the gradient of '0\.weight' is in the store", read)
        assert weight.grad.shape == (16, 8)
        optimizer.step()
        assert weight.grad is None


def test_a_second_gradient_before_the_step_is_refused(training: Training) -> None:
    model = training.model
    train(model, training.optimizer, range(2))
    model(batch(2)).square().mean().backward()
    # Another model's pass is none of this one's.
    nn.Linear(8, 2)(batch(2)).sum().backward()
    with pytest.raises(PluginError, match=r"second gradient before step\(\)"):
        model(batch(3)).square().mean().backward()
    assert training.session.error is not None


def test_a_step_after_another_models_pass_takes_the_gradients(training: Training) -> None:
    for step in range(STEPS):
        training.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        training.model(batch(step)).square().mean().backward()
        nn.Linear(8, 2)(batch(step)).sum().backward()
        training.optimizer.step()
    assert training.equals(plain())


def test_a_parameter_without_a_gradient_is_named(training: Training) -> None:
    train(training.model, training.optimizer, range(1))
    training.model[0](batch(1)).sum().backward()
    with pytest.raises(UnusedParameterError, match=r"4 parameters got no gradient on worker 0"):
        training.optimizer.step()


def test_a_step_without_gradients_changes_nothing(training: Training) -> None:
    train(training.model, training.optimizer, range(STEPS))
    training.optimizer.step()
    assert training.equals(plain())


def test_what_is_left_after_the_end_is_ordinary(training: Training) -> None:
    train(training.model, training.optimizer, range(2))
    training.model(batch(2)).square().mean().backward()
    training.session.close()
    assert all(p.grad is None for p in training.model.parameters())
    assert all(type(p) is nn.Parameter for p in training.model.parameters())
