"""What a trial finds, and that nothing but what is known or vouched for is deferred."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from looped import Training, check_equal, inputs
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import bytesched
from bytesched.errors import PluginError
from bytesched.plugins.proxies.pending import is_held
from bytesched.plugins.update.delegation import stepping_optimizer
from bytesched.plugins.update.probe import why_not_separable
from bytesched.plugins.update.separable import why_not_deferred
from bytesched.testing import Loopback


def evaluated(closure: Any) -> Any:
    with torch.enable_grad():
        return closure() if closure is not None else None


class Lion(Optimizer):
    """Signs of a momentum: elementwise, and in nobody's list."""

    lock: threading.Lock

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self._update(parameter, group, *group["betas"])
        return loss

    def _update(self, parameter: Tensor, group: Any, beta1: float, beta2: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"]
        direction = momentum.mul(beta1).add_(parameter.grad, alpha=1 - beta1)
        parameter.add_(direction.sign_(), alpha=-group["lr"])
        momentum.lerp_(parameter.grad, 1 - beta2)


class Lamb(Lion):
    """The norm of a whole parameter; a state of its own making; steps are counted in the group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group.setdefault("moments", torch.zeros(())).add_(1)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter not in self.state:
                    self.state[parameter] = {"average": parameter.grad.clone()}
                average = self.state[parameter]["average"]
                average.mul_(0.9).add_(parameter.grad / float(group["moments"]))
                trust = parameter.norm() / (average.norm() + 1e-6)
                parameter.sub_(average * trust * group["lr"] / group["count"])
        return loss


class Scaled(Lion):
    """By the largest gradient of all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluated(closure)
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        largest = max((float(g.abs().max()) for g in gradients if g is not None), default=1.0)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / largest)
        return loss


class NowAndThen(Lion):
    """Every fifth step takes the mean of what all parameters have seen."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, 0.9, 0.99)
            if group["count"] % 5 == 0:
                moments = [self.state[p]["momentum"].mean() for p in group["params"]]
                for parameter in group["params"]:
                    parameter.sub_(torch.stack(moments).mean())
        return loss


class Iterating(Lion):
    """Reads the state of everything."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / (1 + len(self.state)))
                    self.state[parameter]["seen"] = True
        return loss


class Noisy(Lion):
    def _update(self, parameter: Tensor, group: Any, beta1: float, beta2: float) -> None:
        super()._update(parameter, group, beta1, beta2)
        parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class Counting(Lion):
    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = evaluated(closure)
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])
        return loss


class Twice(Lion):
    """Steps, evaluates, and steps again."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, 0.9, 0.99)
        return evaluated(closure)


class Above(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@bytesched.separable
class VouchedLion(Lion):
    """Elementwise, as its user knows."""


@bytesched.separable
class VouchedLamb(Lamb):
    """By parameter, as its user knows."""


def made(kind: Any, **arguments: Any) -> Any:
    def optimizer_of(model: nn.Module) -> Optimizer:
        weights = [p for p in model.parameters() if p.dim() == 2 or kind is not torch.optim.Muon]
        return kind(weights, **arguments)  # type: ignore[no-any-return]

    return optimizer_of


@pytest.mark.parametrize(
    "kind", [VouchedLion, VouchedLamb, torch.optim.Muon, torch.optim.Adafactor]
)
@pytest.mark.parametrize("closures", [False, True])
def test_what_updates_each_parameter_by_itself_crosses(
    loopback: Loopback, kind: Any, closures: bool
) -> None:
    ours, plain = Training(loopback, made(kind)), Training(None, made(kind))
    for training in (ours, plain):
        training.train(3)
        training.flush()
        if training is ours:
            loopback.hold()
        if closures:

            def closure(training: Training = training) -> Tensor:
                training.optimizer.zero_grad()
                loss: Tensor = training.model(inputs(9)).square().mean()
                loss.backward()
                return loss

            training.optimizer.step(closure)  # type: ignore[arg-type]
        else:
            training.train()
    weights = ours.optimizer.param_groups[0]["params"]
    assert all(is_held(weight) for weight in weights)
    loopback.release()
    ours.train(3)
    plain.train(3)
    check_equal(ours, plain)
    groups = [training.optimizer.state_dict()["param_groups"] for training in (ours, plain)]
    assert groups[0] == groups[1]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Scaled, "does not update each parameter on its own"),
        (NowAndThen, "does not update each parameter on its own"),
        (Iterating, "cannot be tried on copies"),
        (Noisy, "draws random numbers"),
        (Counting, "changes its attributes"),
        (Twice, "does not call its closure once"),
        (torch.optim.LBFGS, "does not"),
        (Above, "calls the step of another class"),
        (Lion, ""),
        (Lamb, ""),
    ],
)
def test_what_nobody_knows_is_stepped_whole(loopback: Loopback, kind: Any, reason: str) -> None:
    """Whatever a trial says of it."""
    optimizer = made(kind)(nn.Linear(3, 2))
    found = why_not_separable(optimizer, kind)
    assert reason in found if reason else not found
    assert "is not known to update each parameter" in why_not_deferred(optimizer, kind)
    if kind is torch.optim.LBFGS:
        return
    ours, plain = Training(loopback, made(kind)), Training(None, made(kind))
    for training in (ours, plain):
        torch.manual_seed(3)
        training.train(4)
    assert not ours.crossed_steps()
    check_equal(ours, plain)


def test_a_probe_leaves_no_trace() -> None:
    model = nn.Linear(3, 2)
    optimizer = Lion(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    gradients = [p.grad for p in model.parameters()]
    attributes = dict(vars(optimizer))
    state = {id(p): dict(entry) for p, entry in optimizer.state.items()}
    random_before = random.getstate(), torch.get_rng_state()
    assert why_not_separable(optimizer, Lion) == ""
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert vars(optimizer) == attributes
    assert {id(p): dict(entry) for p, entry in optimizer.state.items()} == state
    assert random.getstate() == random_before[0]
    assert torch.equal(torch.get_rng_state(), random_before[1])


@pytest.mark.parametrize("draw", ["torch.rand(1)", "random.random()", "numpy.random.rand()"])
def test_a_trial_leaves_every_generator_as_it_was(draw: str) -> None:
    numpy = pytest.importorskip("numpy")
    names = {"torch": torch, "random": random, "numpy": numpy}

    class Drawing(Lion):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = evaluated(closure)
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(float(eval(draw, names)))
            return loss

    def draws() -> list[float]:
        return [float(eval(each, names)) for each in sorted(("torch.rand(1)", draw))]

    optimizer = Drawing(nn.Linear(3, 2).parameters())
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    expected = draws()
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    assert "draws random numbers" in bytesched.explain_optimizer(optimizer)
    assert draws() == expected


def test_what_cannot_be_copied_is_left_out() -> None:
    """As Horovod's handles are; only a step that needs it is not taken."""

    class Locking(Lion):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            with self.lock:
                return evaluated(closure)

    optimizer_shards, locking = (
        Lion(nn.Linear(3, 2).parameters()),
        Locking(nn.Linear(3, 2).parameters()),
    )
    optimizer_shards.lock = locking.lock = threading.Lock()
    assert why_not_separable(optimizer_shards, Lion) == ""
    assert "cannot be tried on copies" in why_not_separable(locking, Locking)


def test_settings_decide() -> None:
    """A class may clip by the norm of all gradients, or not."""

    class Clipping(Lion):
        limit = 0.0

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = evaluated(closure)
            for group in self.param_groups:
                used = [p for p in group["params"] if p.grad is not None]
                clip = 1.0
                limit = group.get("limit", self.limit)
                if limit and used:
                    norm = float(torch.stack([p.grad.norm() for p in used]).norm())
                    clip = min(1.0, limit / norm)
                for parameter in used:
                    parameter.sub_(parameter.grad, alpha=clip * group["lr"])
            return loss

    model = nn.Linear(3, 2)
    free, clipping, later = (Clipping(model.parameters()) for _ in range(3))
    clipping.param_groups[0]["limit"] = 1.0
    later.limit = 1.0
    assert not why_not_separable(free, Clipping)
    assert why_not_separable(clipping, Clipping)
    assert why_not_separable(later, Clipping)


def test_a_user_vouches_for_a_class() -> None:
    class Vouched(Counting):
        pass

    optimizer = Vouched(nn.Linear(3, 2).parameters())
    assert why_not_deferred(optimizer, Vouched)
    assert bytesched.separable(Vouched) is Vouched
    assert not why_not_deferred(optimizer, Vouched)
    with pytest.raises(PluginError, match="not a class of torch optimizers"):
        bytesched.separable(nn.Linear)


class Shell(Optimizer):
    """As trainers have them: a torch optimizer in name, which delegates."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Lookahead(Shell):
    """Slow weights, which follow every other step."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.steps = 0
        self.slow = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)
        return loss


class Ascending(Optimizer):
    """SAM: initialised as an optimizer is, with another one that does the step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        shifts = []
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                shifts.append(0.05 * parameter.grad.sign())
                parameter.add_(shifts[-1])
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for parameter, shift in zip(self.param_groups[0]["params"], shifts, strict=True):
                parameter.sub_(shift)
        self.base.step()
        return loss


def test_what_an_optimizer_delegates_to_is_what_steps() -> None:
    weights = list(nn.Linear(3, 2).parameters())
    inner = SGD(weights, lr=0.1)
    assert stepping_optimizer(inner) is inner
    assert stepping_optimizer(Shell(inner)) is inner
    assert stepping_optimizer(Shell(Lookahead(inner))) is inner
    sam = Ascending(weights)
    assert stepping_optimizer(sam) is sam.base


def test_an_optimizer_in_name_only_is_refused() -> None:
    shell = Shell(SGD(nn.Linear(3, 2).parameters(), lr=0.1))
    del shell.optimizer
    with pytest.raises(PluginError, match="never called Optimizer"):
        stepping_optimizer(shell)


@pytest.mark.parametrize("shell_of", [Shell, Lookahead, Ascending])
def test_a_shell_trains_as_it_would(loopback: Loopback, shell_of: Any) -> None:
    trained = []
    for wire in (loopback, None):
        training = Training(None)
        if shell_of is Ascending:
            shell = Ascending(training.model.parameters())
        else:
            shell = shell_of(training.optimizer)
        if wire is not None:
            inner = stepping_optimizer(shell)
            training.session = wire.wrap(training.model, inner, partition_bytes=256)
        for seed in range(6):

            def closure(training: Training = training, shell: Any = shell, seed: int = seed) -> Any:
                shell.zero_grad()
                loss = training.model(inputs(seed)).square().mean()
                loss.backward()
                return loss

            closure()
            shell.step(closure)
        trained.append(training)
        training.optimizer = stepping_optimizer(shell)
    check_equal(*trained)
